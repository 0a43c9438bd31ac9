"""Steps of a stream over replicas that sleep for each token, against the simulation of the same lengths and speeds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest

from fivefold.batch import Columns
from fivefold.planning.simulation.lengths import Lengths, log_normal
from fivefold.planning.simulation.run import N_STEPS, N_WARM_UP, Setting, simulate
from fivefold.roles import rollout_stream
from fivefold.roles.responses import Job, Responses
from fivefold.rollout.protocol import GenerationRequest, SamplingParams, ServerCounts
from fivefold.types import Completion, Prompt
from tests.unit.experience.local_replicas import EngineWorker, LocalGroup
from tests.unit.experience.streams import BATCH, SAMPLES, common, full_marks, recipe_of

STEPS, SLOTS = N_WARM_UP + N_STEPS, 3
TOKEN_S, TRAIN_S = 0.004, 0.1


@dataclass(frozen=True)
class GivenLengths(Lengths):
    """Lengths of one group after the other."""

    def draw(self, random: Random, n: int) -> list[int]:
        start = self.__dict__.setdefault("n_drawn", 0)
        self.__dict__["n_drawn"] += n
        return [self.values[index % len(self.values)] for index in range(start, start + n)]


class SleepingEngine:
    """Sleeps for each token that its requests get together; a request's length is that of its place in the run."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._left: dict[int, int] = {}
        """Tokens that each running request lacks, by its number."""
        self._waiting: deque[tuple[int, int]] = deque()
        """Numbers and lengths of the requests that have not begun."""
        self.places: dict[int, int] = {}
        """Place of each request in the run, by its seed."""
        self.has_weights = True
        self.seconds = 0.0
        self.n_tokens = 0
        """Tokens of each request that were decoded, and how long that took, with what lies between two slices."""
        self._since: float | None = None

    @property
    def n_running(self) -> int:
        return len(self._left) + len(self._waiting)

    def take_restarts(self) -> list[str]:
        return []

    def take_counts(self) -> ServerCounts:
        return ServerCounts()

    def take_lost(self) -> dict[int, GenerationRequest]:
        return {}

    def submit(self, number: int, request: GenerationRequest, sampling: SamplingParams) -> None:
        self._waiting.append((number, self._lengths[self.places[request.seed]]))

    def collect(self, seconds: float) -> list[tuple[int, Completion]]:
        began = time.perf_counter()
        before = began if self._since is None else self._since
        while self.n_running and time.perf_counter() < began + seconds:
            while self._waiting and len(self._left) < SLOTS:
                number, length = self._waiting.popleft()
                self._left[number] = length
            time.sleep(TOKEN_S)
            done = [number for number, left in self._left.items() if left <= 1]
            self._left = {number: left - 1 for number, left in self._left.items() if left > 1}
            now = time.perf_counter()
            self.seconds += now - before
            self.n_tokens += 1
            before = now
            self._since = now if self.n_running else None
            if done:
                return [(number, Completion.of([5], [-1.0], "stop", 0)) for number in sorted(done)]
        return []


class SleepingWorker(EngineWorker):
    """A replica with a `SleepingEngine`."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.engine = SleepingEngine(lengths)
        super().__init__(self.engine)

    def advance(self, jobs: Sequence[Job], seconds: float) -> tuple[Responses, Columns | None]:
        """Tell the engine the place of each request in the run."""
        for job in jobs:
            self.engine.places |= {each.seed: SAMPLES * job.number + n for n, each in enumerate(job.requests)}
        return super().advance(jobs, seconds)

    def set_version(self, version: int) -> None:
        """Wait for the slice in progress, as new weights do."""


@pytest.mark.parametrize("age", [0, 2])
def test_steps_take_as_long_as_the_simulation_says(age: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_stream, "SLICE_S", 0.02)
    lengths = tuple(log_normal(25, 150).draw(Random(1), (STEPS + age + 1) * BATCH * SAMPLES))
    workers = [SleepingWorker(lengths) for _ in range(2)]
    group = LocalGroup(workers)
    recipe = recipe_of(f"rollout.max_batch_size={SLOTS}")
    rollout = recipe.rollout.model_copy(update={"max_head_offpolicyness": age})
    # Of prompts that come once, no length is known, so that they keep their order.
    prompts = [Prompt(i, str(i), (3, 4 + i), "") for i in range((STEPS + age + 1) * BATCH)]
    ends, trained = [time.perf_counter()], 0.0
    parts = common(recipe.model_copy(update={"rollout": rollout}), group, full_marks, prompts, is_server=True)
    with parts.source(last_step=STEPS + age) as source:
        source.weights_sent(0)
        for step in range(1, STEPS + 1):
            if step == N_WARM_UP + 1:
                trained = 0.0
                for worker in workers:
                    worker.engine.seconds, worker.engine.n_tokens = 0.0, 0
            source.take(step)
            began = time.perf_counter()
            time.sleep(TRAIN_S)
            group.each("set_version", step)
            trained += time.perf_counter() - began
            source.weights_sent(step)
            ends.append(time.perf_counter())
    measured = (ends[-1] - ends[N_WARM_UP]) / N_STEPS
    token_s = sum(w.engine.seconds for w in workers) / sum(w.engine.n_tokens for w in workers)
    setting = Setting(
        batch_size=BATCH,
        group_size=SAMPLES,
        n_replicas=len(workers),
        slots=SLOTS,
        token_seconds=(0.0, token_s),
        train_seconds=trained / N_STEPS,
        update_seconds=0.0,
        max_age=age,
    )
    assert simulate(setting, GivenLengths(lengths)).seconds == pytest.approx(measured, rel=0.15)
