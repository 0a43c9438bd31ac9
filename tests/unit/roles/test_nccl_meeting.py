"""The NCCL group of a trainer and its rollout, which all enter again after a server has restarted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fivefold.roles.weight_sync import ReceivesWeights, SendsWeights, WeightSync
from fivefold.weights import nccl_sender
from fivefold.weights.nccl_link import NcclLink
from fivefold.weights.stream import Stack, alone
from fivefold.weights.table import TRANSPORTS
from fivefold.weights.transport import Route


class Done:
    def wait(self) -> None:
        """Wait for nothing."""


class Replicas:
    """Two replicas; `linked` says whether each is in the group."""

    def __init__(self) -> None:
        self.linked = [False, False]
        self.entered: list[str] = []

    def call(self, method: Callable[..., Any]) -> list[Any]:
        return {ReceivesWeights.expect_transfer: self.linked, ReceivesWeights.meeting: ["unique_id", "unique_id"]}[
            method
        ]

    def start(self, method: Callable[..., Any], invitation: str) -> Done:
        assert method is ReceivesWeights.enter_link
        self.entered.append(invitation)
        self.linked = [True, True]
        return Done()


class Trainer:
    """A trainer's two ranks, the first of which invites."""

    def __init__(self) -> None:
        self.n_entered = 0

    def call(self, method: Callable[..., Any], route: Route, meeting: str) -> list[str | None]:
        assert (method, meeting) == (SendsWeights.open_link, "unique_id")
        return [f"invitation {self.n_entered}", None]

    def start(self, method: Callable[..., Any], route: Route) -> Done:
        assert method is SendsWeights.enter_link
        self.n_entered += 1
        return Done()


def sync_of(transport: str, trainer: Trainer, replicas: Replicas) -> WeightSync:
    route = Route(TRANSPORTS[transport], "bfloat16", checksum=False)
    return WeightSync(route, trainer, replicas)  # type: ignore[arg-type]


def test_all_enter_a_group_at_first_and_again_when_one_was_started_again() -> None:
    replicas, trainer = Replicas(), Trainer()
    sync = sync_of("nccl", trainer, replicas)
    for _ in range(2):
        sync.meet()
    assert replicas.entered == ["invitation 0"]
    replicas.linked = [True, False]
    sync.meet()
    assert replicas.entered == ["invitation 0", "invitation 1"]
    assert trainer.n_entered == 2


def test_weights_through_host_memory_need_no_group() -> None:
    replicas = Replicas()
    sync_of("folder", Trainer(), replicas).meet()
    assert replicas.entered == []


class NotedLink:
    def __init__(self, *arguments: object) -> None:
        self.has_left = False

    def invite(self) -> NotedLink:
        return self

    def leave(self) -> None:
        self.has_left = True


class Weights:
    def export_stacks(self, readers: frozenset[int]) -> Iterator[Stack]:
        yield alone("a", torch.ones(2))


def test_the_trainer_leaves_a_group_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_sender, "NcclLink", NotedLink)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    worker: Any = SimpleNamespace(engine=Weights(), spec=SimpleNamespace(options=SimpleNamespace(timeout_s=1.0)))
    sends, route = SendsWeights(worker), Route(TRANSPORTS["nccl"], "float32", checksum=False)
    links: list[Any] = []
    for n_left in range(3):
        links.append(sends.open_link(route, "unique_id"))
        assert [link.has_left for link in links] == [True] * n_left + [False]
        copy = sends._linked(route)._copy
        assert copy is None or copy.link is links[-1], "a copy is sent in the group of now"
        sends.copy(route)


def test_no_two_groups_have_one_name() -> None:
    links = [NcclLink("torch_group", "127.0.0.1", 2, 1.0) for _ in range(2)]
    first, second = (link.invite().group for link in links)
    assert first != second
