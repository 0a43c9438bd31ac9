"""The seconds that a replica of a stream says it has worked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fivefold.cluster.role import NODE, PLACE_ON_NODE, PROCESSES_ON_NODE
from fivefold.config.paths import resolve_model_path
from fivefold.environments import play
from fivefold.roles import rollout_worker
from fivefold.roles.responses import Job
from fivefold.roles.rollout_worker import RolloutWorker
from fivefold.roles.weight_sync import ReceivesWeights
from fivefold.rollout.protocol import GenerationRequest, SamplingParams, ServerCounts
from fivefold.types import Prompt
from tests.unit.rollout.conftest import spec_of

CALL_S, GAP_S = 2.0, 7.0
SAMPLING = SamplingParams(16, 0, False, 1.0, 1.0, 0, (), ())


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Engine:
    """An engine on which one request never ends, and each call takes `CALL_S`."""

    has_weights = True
    n_running = 1

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def submit(self, number: int, request: Any, sampling: Any) -> None:
        pass

    def collect(self, seconds: float) -> list[Any]:
        self._clock.now += CALL_S
        return []

    def take_restarts(self) -> list[str]:
        return []

    def take_counts(self) -> ServerCounts:
        return ServerCounts()

    def take_lost(self) -> dict[int, Any]:
        return {}

    def swap_weights(self) -> None:
        self._clock.now += CALL_S

    def sleep(self) -> None:
        self._clock.now += CALL_S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rollout_worker, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(play, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(rollout_worker, "build_engine", lambda *arguments: Engine(clock))
    for name, value in ((NODE, "0"), (PLACE_ON_NODE, "0"), (PROCESSES_ON_NODE, "1")):
        monkeypatch.setenv(name, value)
    return clock


def begin(backend: str) -> RolloutWorker:
    """Return a replica that has worked on a request for one call."""
    worker = RolloutWorker(spec_of(backend, Path(resolve_model_path("package:tiny-moe"))))
    job = Job(0, Prompt(0, "", (1,), None), [GenerationRequest((1,), 0)], SAMPLING)
    assert worker.advance([job], seconds=1.0)[0].busy_s == CALL_S
    return worker


def busy(worker: RolloutWorker) -> float:
    """Return the seconds of one more call."""
    return worker.advance([], seconds=1.0)[0].busy_s


@pytest.mark.parametrize(("backend", "wanted"), [("vllm", GAP_S + CALL_S), ("transformers", CALL_S)])
def test_a_server_works_between_two_calls(clock: Clock, backend: str, wanted: float) -> None:
    worker = begin(backend)
    for _ in range(2):
        clock.now += GAP_S
        assert busy(worker) == wanted


@pytest.mark.parametrize("interrupt", [lambda worker: ReceivesWeights(worker).swap(), RolloutWorker.sleep])
def test_an_interrupted_server_does_not(clock: Clock, interrupt: Callable[[RolloutWorker], object]) -> None:
    worker = begin("vllm")
    clock.now += GAP_S
    interrupt(worker)
    assert busy(worker) == CALL_S
    clock.now += GAP_S
    assert busy(worker) == GAP_S + CALL_S
