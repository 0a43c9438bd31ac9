"""Weights that a rollout takes in parallel with training: what is copied first, and what comes later."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fivefold.observe.timers import PhaseTimers
from fivefold.roles import actor as actor_module
from fivefold.roles.actor import Actor
from fivefold.roles.rollout import Rollout
from fivefold.roles.trainer import Trainer
from fivefold.roles.weights_overlap import copy_weights, give_weights
from fivefold.weights.device_buckets import DeviceBucket
from fivefold.weights.offer import WeightOffer
from fivefold.weights.table import TRANSPORTS
from fivefold.weights.transport import Route

BUCKETS = [DeviceBucket((name,), ((2,),), "bfloat16", {}, None) for name in "abc"]


def is_held(lock: threading.RLock) -> bool:
    """Return whether another thread would have to wait for a lock."""
    with ThreadPoolExecutor(1) as thread:
        return not thread.submit(lock.acquire, blocking=False).result()


class NotedGroup:
    """The actor's two ranks; the first one has a copy of three buckets."""

    actor: Actor

    def __init__(self, log: list[str]) -> None:
        self._log, self._left = log, list(BUCKETS)

    def call(self, method: Callable[..., Any], *args: Any) -> list[None]:
        assert is_held(self.actor.in_turn), "a frozen model may work on the actor's devices"
        self._log.append(method.__name__)
        return [None, None]

    def control(self, method: Callable[..., Any], *args: Any) -> list[DeviceBucket | None]:
        self._log.append(method.__name__)
        return [self._left.pop(0) if self._left else None, None]

    def stream(self, method: Callable[..., Any], *args: Any) -> Iterator[DeviceBucket]:
        assert is_held(self.actor.in_turn)
        for bucket in self._left:
            self._log.append(f"bucket {bucket.names[0]}")
            yield bucket


class NotedRollout(Rollout):
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def meet(self, actor: Actor) -> None:
        self._log.append("meet")

    def stage_weights(self, offer: WeightOffer) -> None:
        self._log += ["stage", *(bucket.names[0] for bucket in offer.buckets)]

    def swap_weights(self, version: int) -> None:
        self._log.append(f"swap {version}")

    def take_weights(self, offer: WeightOffer) -> None:
        self._log += ["take", *(bucket.names[0] for bucket in offer.buckets)]


@pytest.mark.parametrize("transport", ["folder", "nccl"])
def test_the_actor_is_free_once_its_weights_are_copied(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_module, "put", lambda bucket: bucket)
    log: list[str] = []
    timers, trainer = PhaseTimers(), object.__new__(Trainer)
    trainer.group = group = NotedGroup(log)  # type: ignore[assignment]
    group.actor = Actor(trainer, Route(TRANSPORTS[transport], "bfloat16", False))
    copy = copy_weights(group.actor, NotedRollout(log), 3, timers)
    copied = [*(["bucket a", "bucket b", "bucket c"] if transport == "folder" else ["copy_weights"]), "meet"]
    assert log == copied, "nothing is left to do for the actor's own thread"
    assert set(timers.take()) == {"weight sync"}
    give_weights(NotedRollout(log), copy, timers, TRANSPORTS[transport])
    if transport == "folder":
        assert log == [*copied, "stage", "a", "b", "c", "swap 3"]
        assert set(timers.take()) == {"weight staging", "weight swap"}
    else:
        assert log == [*copied, *["next_copied"] * 4, "take", "a", "b", "c"]
        assert set(timers.take()) == {"weight swap"}
