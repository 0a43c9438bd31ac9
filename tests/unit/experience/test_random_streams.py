"""Streams of random batches, ages, speeds and failures: which prompts are trained, in which order, and how old."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest

from fivefold.batch import Columns
from fivefold.data.sampler import EpochSampler
from fivefold.rewards.reward import NamedReward
from fivefold.rewards.reward_set import RewardSet
from fivefold.roles.responses import Job, Responses
from fivefold.roles.rollout_worker import RolloutWorker
from fivefold.types import Completion, Episode, Prompt
from tests.unit.experience.local_replicas import LocalGroup, LocalRollout
from tests.unit.experience.streams import Parts, full_marks, recipe_of

STEPS, N_PROMPTS = 15, 23


class RandomWorker(RolloutWorker):
    """Ends each job after a random number of slices, and loses its weights and all jobs now and then."""

    def __init__(self, rng: Random, deaths: float) -> None:
        self._rng, self._deaths = rng, deaths
        self._begun: list[tuple[Job, int]] = []
        """Jobs, and the version that they began with."""
        self.version: int | None = None
        self.n_deaths = 0

    def set_version(self, version: int) -> None:
        time.sleep(self._rng.random() * 0.003)
        self.version = version

    def advance(self, jobs: Sequence[Job], seconds: float) -> tuple[Responses, Columns | None]:
        time.sleep(self._rng.random() * 0.002)
        dies = self.version is not None and self._rng.random() < self._deaths
        if self.version is None or dies:
            lost = {job.number: job.requests for job in [*(job for job, _ in self._begun), *jobs]}
            self._begun, self.version, self.n_deaths = [], None, self.n_deaths + dies
            return replace(Responses.of([], [], []), lost=lost, has_weights=False), None
        self._begun += [(job, self.version) for job in jobs]
        done = [pair for pair in self._begun if self._rng.random() < 0.3]
        self._begun = [pair for pair in self._begun if pair not in done]
        answers = [
            Episode.single_turn(job.prompt, self._completion(began)) for job, began in done for _ in job.requests
        ]
        report = Responses.of([job.number for job, _ in done], answers, ["5"] * len(answers), 0.001)
        n_running = sum(len(job.requests) for job, _ in self._begun)
        return replace(report, n_running=n_running), Columns.of(answers) if answers else None

    def _completion(self, began: int) -> Completion:
        assert self.version is not None
        versions = np.array([began, self.version], np.int32)
        return Completion(np.array([5, 6], np.int32), np.array([-1.0, -1.0], np.float32), versions, "stop")


@pytest.mark.parametrize("seed", range(10))
def test_every_prompt_is_trained_once_in_order_by_young_tokens_whatever_happens(seed: int) -> None:
    rng = Random(seed)
    batch, size, age, most = rng.choice([1, 3, 7]), rng.randint(2, 4), rng.randint(1, 4), rng.choice(["null", 2, 5])
    workers = [RandomWorker(Random(seed + n), deaths=rng.choice([0.0, 0.05])) for n in range(rng.randint(1, 3))]
    group = LocalGroup(workers)
    recipe = recipe_of(
        f"train_dataset.batch_size={batch}", f"gconfig.n_samples={size}", f"rollout.max_head_offpolicyness={age}",
        f"rollout.max_concurrent_rollouts={most}", f"rollout.max_batch_size={rng.randint(1, 8)}",
    )  # fmt: skip
    prompts = [Prompt(i, str(i), (3, 4), "") for i in range(N_PROMPTS)]
    sampler, expected = (EpochSampler(prompts, batch_size=batch, shuffle=True, seed=seed) for _ in range(2))
    rewards = RewardSet.of(NamedReward("f", full_marks, None))
    parts = Parts(recipe, sampler, LocalRollout(group, is_server=True), rewards)
    with parts.source(last_step=STEPS, resend=partial(group.each, "set_version")) as source:
        source.weights_follow(0, partial(group.each, "set_version", 0))
        for step in range(1, STEPS + 1):
            samples = source.take(step).samples
            assert [s.prompt.index for s in samples] == [p.index for p in expected.next_batch() for _ in range(size)]
            assert all(step - 1 - age <= s.versions[0] <= s.versions[1] < step for s in samples)
            time.sleep(rng.random() * 0.01)
            source.weights_follow(step, partial(group.each, "set_version", step))
            if rng.random() < 0.3:  # an evaluation, with the weights of the step
                source.stream.settle()
                assert {worker.version for worker in workers} <= {step, None}
