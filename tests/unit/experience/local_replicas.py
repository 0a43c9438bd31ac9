"""Replicas in this process: a group of rollout workers, each of which runs its calls one by one in a thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from fivefold.batch import Columns
from fivefold.cluster.group import KeptCall, WorkerGroup
from fivefold.environments.play import Player
from fivefold.environments.single_turn import SingleTurn
from fivefold.roles.responses import Job, Responses
from fivefold.roles.rollout import ExpectedLengths, Gate, Rollout
from fivefold.roles.rollout_worker import RolloutWorker
from fivefold.rollout.tokenizer import load_tokenizer
from fivefold.rollout.transformers_engine import TransformersEngine

MODEL = "package:tiny-moe"


class EngineWorker(RolloutWorker):
    """A replica around an engine of a test."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._player = Player(engine, SingleTurn())
        self._tokenizer = load_tokenizer(MODEL.replace("package:", "fivefold/models/"))
        self._jobs, self._told = {}, {}
        self._answers_beside, self._reported_at = False, None
        self.spec = SimpleNamespace(environment=None)  # type: ignore[assignment]


class LocalWorker(EngineWorker):
    """A replica of the package's small model."""

    def __init__(self, max_batch_size: int) -> None:
        engine = TransformersEngine.from_path(
            MODEL, dtype="float32", device="cpu", max_batch_size=max_batch_size, tokenizer_path=None, load_weights=True
        )
        super().__init__(engine)
        self._end: int | None = None
        self._held: list[Job] = []

    def hold(self, end: int | None) -> None:
        """Begin no job whose number is `end` or above, until the next call; None: begin all."""
        self._end = end

    def advance(self, jobs: Sequence[Job], seconds: float) -> tuple[Responses, Columns | None]:
        """Go on with the jobs that are not held."""
        jobs = [*self._held, *jobs]
        self._held = [job for job in jobs if self._end is not None and job.number >= self._end]
        begun = [job for job in jobs if self._end is None or job.number < self._end]
        report, columns = super().advance(begun, seconds)
        n_held = sum(len(job.requests) for job in self._held)
        return replace(report, n_running=report.n_running + n_held), columns

    def set_version(self, version: int) -> None:
        """Give the replica the weights that it has, under another version."""
        assert isinstance(self.engine, TransformersEngine)
        self.engine.update_weights(list(self.engine.weights()), version)

    def set_weights_of(self, version: int) -> None:
        """Give the replica weights that depend on the version alone."""
        assert isinstance(self.engine, TransformersEngine)
        generator = torch.Generator().manual_seed(version)
        weights = [
            (name, 0.2 * torch.randn(weight.shape, generator=generator)) for name, weight in self.engine.weights()
        ]
        self.engine.update_weights(weights, version)


class LocalGroup(WorkerGroup):
    """Workers whose calls run in threads of this process."""

    name = "rollout"

    def __init__(self, workers: Sequence[Any]) -> None:
        self._replicas = list(workers)
        self._threads = [ThreadPoolExecutor(1) for _ in workers]

    def __len__(self) -> int:
        return len(self._replicas)

    def keep_on(self, rank: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> KeptCall[Any]:
        future = self._submit(rank, method.__name__, *args)
        return KeptCall(rank, future, future, "", time.monotonic())  # type: ignore[arg-type]

    def first_kept(self, calls: Sequence[KeptCall[Any]]) -> tuple[KeptCall[Any], Any]:
        futures: list[Any] = [call.summary for call in calls]
        done, _ = wait(futures, return_when=FIRST_COMPLETED)
        call = next(call for call in calls if call.summary in done)
        return call, call.summary.result()[0]  # type: ignore[attr-defined]

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        return [future.result() for future in [self._submit(rank, method.__name__, *args) for rank in range(len(self))]]

    def each(self, method: str, *args: Any) -> None:
        """Run a method on every worker, after the calls that are in progress."""
        for future in [self._submit(rank, method, *args) for rank in range(len(self))]:
            future.result()

    def _submit(self, rank: int, method: str, *args: Any) -> Future[Any]:
        return self._threads[rank].submit(getattr(self._replicas[rank], method), *args)


class LocalRollout(Rollout):
    """The driver's handle of a local group."""

    def __init__(self, group: LocalGroup, *, is_server: bool = False) -> None:
        self._group = group
        self.gate = Gate()
        self.shares_devices = False
        self.is_server = is_server
        self._expected = ExpectedLengths()
        self.version = 0
