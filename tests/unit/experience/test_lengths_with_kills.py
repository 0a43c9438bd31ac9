"""Lengths of what a stream trains on, with and without kills: killed completions go on, and keep their lengths."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest

from fivefold.engine.state.dcp_files import finish
from fivefold.experience.waiting import Saved, read_waiting
from fivefold.rollout.protocol import Begun, GenerationRequest, SamplingParams, ServerCounts
from fivefold.types import Completion, Prompt
from tests.unit.experience.local_replicas import EngineWorker, LocalGroup
from tests.unit.experience.streams import BATCH, SAMPLES, common, full_marks, recipe_of

STEPS, AGE, MEAN = 60, 2, 50
TOKENS = 25
"""Tokens of each request between two updates of the weights."""


class TossingEngine:
    """Ends a completion with the same probability at each token, and draws other numbers every time, as servers do."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._requests: dict[int, GenerationRequest] = {}
        self._version = -1
        self._n_left = 0
        self.trainer_waits = False
        self.has_weights = True

    @property
    def n_running(self) -> int:
        return len(self._requests)

    def take_restarts(self) -> list[str]:
        return []

    def take_counts(self) -> ServerCounts:
        return ServerCounts()

    def take_lost(self) -> dict[int, GenerationRequest]:
        return {}

    def unfinished(self) -> dict[int, GenerationRequest]:
        return dict(self._requests)

    def set_version(self, version: int) -> None:
        self._version, self._n_left = version, TOKENS

    def submit(self, number: int, request: GenerationRequest, sampling: SamplingParams) -> None:
        self._requests[number] = request

    def collect(self, seconds: float) -> list[tuple[int, Completion]]:
        """Give each running request `TOKENS` tokens once for each update, and again while the trainer waits."""
        time.sleep(0.001)
        n, self._n_left = TOKENS if self.trainer_waits else self._n_left, 0
        self._requests = {number: self._longer(request, n) for number, request in self._requests.items()}
        done = [number for number, request in self._requests.items() if _has_ended(request)]
        return [(number, _completion(self._requests.pop(number))) for number in done]

    def _longer(self, request: GenerationRequest, n: int) -> GenerationRequest:
        if _has_ended(request) or n == 0:
            return request
        length = int(self._random.geometric(1 / MEAN))
        n_new, reason = (length, "stop") if length <= n else (n, None)
        new = Begun(
            np.full(n_new, 5, np.int32),
            np.full(n_new, -1.0, np.float32),
            np.full(n_new, self._version, np.int32),
            reason,
        )
        begun = new if request.begun is None else Begun.joined([request.begun, new])
        return GenerationRequest(request.token_ids, request.seed, begun=begun)


def _has_ended(request: GenerationRequest) -> bool:
    return request.begun is not None and request.begun.finish_reason is not None


def _completion(request: GenerationRequest) -> Completion:
    begun = request.begun
    assert begun is not None
    assert begun.finish_reason is not None
    return Completion(begun.token_ids, begun.logprobs, begun.versions, begun.finish_reason)


class TossingWorker(EngineWorker):
    """A replica with a `TossingEngine`."""

    def __init__(self, seed: int) -> None:
        self.engine = TossingEngine(seed)
        super().__init__(self.engine)

    def set_version(self, version: int) -> None:
        self.engine.set_version(version)


def trained(prompts: list[Prompt], folder: Path, kills: set[int]) -> list[int]:
    """Return the lengths of all samples of a run that is killed after some steps and goes on from its checkpoint."""
    recipe = recipe_of(f"rollout.max_head_offpolicyness={AGE}", "gconfig.max_new_tokens=2000")
    lengths: list[int] = []
    saved, position, step = Saved(), None, 0
    while step < STEPS:
        worker = TossingWorker(seed=step)
        group = LocalGroup([worker])
        parts = common(recipe, group, full_marks, prompts)
        if position is not None:
            parts.sampler.load_state_dict(position)
        with parts.source(first_step=step + 1, last_step=STEPS, saved=saved) as source:
            group.each("set_version", step)
            source.weights_sent(step)
            while step < STEPS:
                step += 1
                worker.engine.trainer_waits = True
                taken = source.take(step)
                worker.engine.trainer_waits = False
                assert all(step - 1 - AGE <= version < step for sample in taken.samples for version in sample.versions)
                lengths += [sample.n_sampled for sample in taken.samples]
                group.each("set_version", step)
                source.weights_sent(step)
                if step in kills:
                    time.sleep(0.03)  # until the replica has nothing to do
                    position, [owner] = source.sampler_state, source.owners.values()
                    owner.snapshot(folder / str(step))
                    finish(folder / str(step), owner.write_snapshot())
                    saved = read_waiting(folder / str(step))
                    break
    return lengths


@pytest.mark.usefixtures("local_objects")
@pytest.mark.long
def test_kills_favour_neither_short_completions_nor_long_ones(tmp_path: Path) -> None:
    prompts = [Prompt(i, str(i), (3, 4), "") for i in range(12)]
    without, killed = trained(prompts, tmp_path, set()), trained(prompts, tmp_path, set(range(1, STEPS)))
    assert len(without) == len(killed) == STEPS * BATCH * SAMPLES
    error = MEAN / math.sqrt(len(killed))
    for lengths in (without, killed):
        assert abs(np.mean(lengths) - MEAN) < 4 * error
        assert abs(np.mean(np.array(lengths) > 2 * MEAN) - math.exp(-2)) < 4 * 0.34 / math.sqrt(len(lengths))
