"""Metrics of samples against their definitions."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations
from statistics import mean

import pytest

from fivefold.experience.samples import idle_shares, sample_metrics
from fivefold.experience.staleness import staleness_metrics
from fivefold.types import Prompt, Sample


def sample(index: int, reward: float, length: int) -> Sample:
    prompt = Prompt(index, "q", (1,), "a")
    return Sample(prompt, "a", "stop", length + 1, length, (0, 0), {"r": reward})


def test_pass_at_k_is_the_share_of_subsets_with_a_right_completion() -> None:
    rng = random.Random(6)
    for _ in range(100):
        n, n_prompts = rng.randint(1, 9), rng.randint(1, 4)
        rewards = [[rng.choice([0.0, 0.5, 1.0]) for _ in range(n)] for _ in range(n_prompts)]
        samples = [sample(i, reward, 3) for i, row in enumerate(rewards) for reward in row]
        rng.shuffle(samples)
        metrics = sample_metrics(samples)
        expected = {
            f"pass_at/{k}": mean(mean(max(chosen) >= 1 for chosen in combinations(row, k)) for row in rewards)
            for k in (2, 4, 8)
            if k <= n
        }
        found = {name: value for name, value in metrics.items() if name.startswith("pass_at/")}
        assert found == pytest.approx(expected)


def test_percentiles_of_lengths_are_interpolated() -> None:
    metrics = sample_metrics([sample(i, 0.0, length) for i, length in enumerate([40, 10, 20, 30, 50])])
    assert (metrics["response_length/p10"], metrics["response_length/p50"]) == (14.0, 30.0)
    assert metrics["response_length/p90"] == pytest.approx(46.0)


def test_samples_of_each_age_are_told_apart() -> None:
    ages = [(2, 1.0, 30), (0, 0.0, 10), (2, 0.0, 50), (1, 1.0, 20)]
    samples = [replace(sample(0, reward, length), versions=(7 - age, 7)) for age, reward, length in ages]
    metrics = staleness_metrics(samples, version=7)
    assert {name: value for name, value in metrics.items() if name[-1].isdigit()} == {
        "staleness/share/0": 0.25, "staleness/share/1": 0.25, "staleness/share/2": 0.5,
        "staleness/reward/0": 0.0, "staleness/reward/1": 1.0, "staleness/reward/2": 0.5,
        "staleness/response_length/0": 10.0, "staleness/response_length/1": 20.0, "staleness/response_length/2": 40.0,
    }  # fmt: skip
    assert (metrics["staleness/mean"], metrics["staleness/max"], metrics["staleness/mixed"]) == (1.25, 2.0, 0.75)


def test_sides_that_work_in_turn_are_idle_while_the_other_works() -> None:
    seconds = {"rollout": 6.0, "rewards": 1.0, "train": 3.0}
    shares = idle_shares({"replica_busy/mean": 0.5}, seconds, 12.0)
    assert shares == {"idle/trainer": pytest.approx(7 / 12), "idle/rollout": pytest.approx(1 - 3 / 12)}
