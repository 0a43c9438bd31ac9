"""Metrics of micro-batches, ranks and updates become one number a step."""

from __future__ import annotations

import math
import random

import pytest
import torch

from fivefold.algorithms.metrics import Metric, Metrics, Reduction, merge_metrics, metric_values
from fivefold.algorithms.policy_loss import mismatch_metrics


def update(entropies: list[float], known: list[bool], **whole: float) -> Metrics:
    """Return the metrics of an update over tokens with these entropies, of which some have a rollout's log-prob."""
    n = len(entropies)
    rollout_T = torch.tensor([-1.1 if each else math.nan for each in known], dtype=torch.float64)
    mismatch = mismatch_metrics(torch.full((n,), -1.0, dtype=torch.float64), rollout_T, torch.ones(n, dtype=torch.bool))
    largest = {"ratio/max": Metric(max(entropies, default=-math.inf), n, "max")}
    lr = {"lr": Metric(whole.pop("lr", 1.0), reduce="last")}
    return {
        "entropy": Metric(sum(entropies), n),
        **largest,
        **mismatch,
        **lr,
        **{k: Metric(v) for k, v in whole.items()},
    }


def test_means_over_tokens_weigh_updates_by_their_trained_tokens() -> None:
    """All completions of the second update were cut off, and of the third one no log-prob of the rollout is known."""
    first = update([1.0] * 10, [True] * 10, loss=3.0, grad_norm=1.0, lr=3.0)
    second = update([], [], loss=0.0, grad_norm=0.0, lr=2.0)
    third = update([2.0] * 30, [False] * 30, loss=6.0, grad_norm=2.0, lr=1.0)
    found = metric_values(merge_metrics([first, second, third]))
    assert found["entropy"] == pytest.approx((10 * 1.0 + 30 * 2.0) / 40)
    assert found["rollout_mismatch_share"] == pytest.approx(10 / 40)
    assert found["rollout_mismatch"] == pytest.approx(0.1)
    assert found["rollout_ess"] == pytest.approx(1.0)
    assert found["ratio/max"] == 2.0
    # These belong to an update as a whole.
    assert (found["loss"], found["grad_norm"]) == pytest.approx((3.0, 1.0))
    assert found["lr"] == 1.0


def test_metrics_over_no_token_are_left_out() -> None:
    assert metric_values(update([], [], loss=0.0)) == {"loss": 0.0, "lr": 1.0}
    unknown = metric_values(update([1.0] * 5, [False] * 5))
    assert unknown == {"entropy": 1.0, "ratio/max": 1.0, "rollout_mismatch_share": 0.0, "lr": 1.0}
    assert metric_values({"staleness/tokens/3": Metric(0.0, 5.0, "share")}) == {}


def test_effective_sample_sizes_follow_from_the_weights() -> None:
    weights = [2.0, 1.0, 0.5]  # a fourth token has no log-prob of the rollout
    rollout_T = torch.tensor([*(-math.log(w) for w in weights), math.nan], dtype=torch.float64)
    trained_T = torch.ones(4, dtype=torch.bool)
    found = metric_values(mismatch_metrics(torch.zeros(4, dtype=torch.float64), rollout_T, trained_T))
    assert found["rollout_ratio"] == pytest.approx(sum(weights) / 3)
    assert found["rollout_ess"] == pytest.approx(sum(weights) ** 2 / (3 * sum(w * w for w in weights)))


@pytest.mark.parametrize("reduce", ["mean", "share", "ess", "sum", "max", "min"])
def test_any_split_gives_the_number_of_the_whole(reduce: Reduction) -> None:
    rng = random.Random(reduce)
    for _ in range(100):
        numbers = [rng.gauss(1.0, 0.5) for _ in range(rng.randint(1, 8))]
        wanted = {
            "mean": sum(numbers) / len(numbers),
            "share": sum(numbers) / len(numbers),
            "ess": sum(numbers) ** 2 / sum(x * x for x in numbers) / len(numbers),
            "sum": sum(numbers),
            "max": max(numbers),
            "min": min(numbers),
        }[reduce]
        parts = [{"x": Metric(torch.tensor(x, dtype=torch.float64), 1.0, reduce, x * x)} for x in numbers]
        rng.shuffle(parts)
        cut = rng.randint(0, len(parts))
        halves = [merge_metrics(parts[:cut]), merge_metrics(parts[cut:])]
        assert metric_values(merge_metrics(halves)) == {"x": pytest.approx(wanted)}
