"""Weights that a rollout takes in parallel with training: what is copied first, and what comes later."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fivefold.observe.timers import PhaseTimers
from fivefold.roles import weight_sync
from fivefold.roles.actor import Actor
from fivefold.roles.devices import Roles
from fivefold.roles.models import Trainer
from fivefold.roles.rollout import Rollout
from fivefold.roles.weight_sync import ReceivesWeights, WeightSync
from fivefold.weights.device_buckets import DeviceBucket
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


class NotedReplicas:
    """Replicas that are all in the NCCL group."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def call(self, method: Callable[..., Any]) -> list[bool]:
        self._log.append(method.__name__)
        return [True]

    def feed(self, method: Callable[..., Any], items: Iterable[DeviceBucket], version: int) -> None:
        assert method is ReceivesWeights.take
        self._log += [f"take {version}", *(bucket.names[0] for bucket in items)]

    def feed_beside(self, method: Callable[..., Any], items: Iterable[DeviceBucket], version: int) -> None:
        assert method is ReceivesWeights.stage
        self._log += [f"stage {version}", *(bucket.names[0] for bucket in items)]


@pytest.mark.parametrize("transport", ["folder", "nccl"])
def test_the_actor_is_free_once_its_weights_are_copied(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_sync, "put", lambda bucket: bucket)
    log: list[str] = []
    timers, trainer = PhaseTimers(), object.__new__(Trainer)
    trainer.group = group = NotedGroup(log)  # type: ignore[assignment]
    group.actor = Actor(trainer)
    replicas: Any = NotedReplicas(log)
    rollout = Rollout(replicas, shares_devices=False, is_server=True)
    sync = WeightSync(Route(TRANSPORTS[transport], "bfloat16", False), trainer.group, replicas)
    roles = Roles(group.actor, rollout=rollout, sync=sync)
    copied = roles.copy_weights(timers)
    before = ["bucket a", "bucket b", "bucket c"] if transport == "folder" else ["copy", "expect_transfer"]
    assert log == before, "nothing is left to do for the actor's own thread"
    assert rollout.version is None
    assert set(timers.take()) == {"weight sync"}
    roles.give_weights(copied, 3, timers)
    assert rollout.version == 3
    if transport == "folder":
        assert log == [*before, "stage 3", "a", "b", "c", "swap"]
        assert set(timers.take()) == {"weight staging", "weight swap"}
    else:
        assert log == [*before, *["next_copied"] * 4, "take 3", "a", "b", "c"]
        assert set(timers.take()) == {"weight swap"}
