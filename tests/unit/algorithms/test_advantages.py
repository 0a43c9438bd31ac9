"""Advantages against Python's `statistics` and numbers computed by hand."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

from fivefold.algorithms.advantages import compute_advantages, subtract_kl_to_go
from fivefold.config.schema import ActorConfig, NormConfig
from fivefold.types import Batch

REWARDS = [1.0, 0.0, 0.5, 0.25, 2.0, -1.0, 0.75]
GROUPS = [7, 7, 3, 3, 7, 3, 3]
EPS = 1e-6


def config(mean: str = "group", std: str = "group", **options: Any) -> ActorConfig:
    return ActorConfig(path="m", reward_norm=NormConfig(mean_level=mean, std_level=std, eps=EPS), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("mean", ["group", "batch", "none"])
@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_every_pair_of_levels_equals_pythons_statistics(mean: str, std: str) -> None:
    result = compute_advantages(REWARDS, GROUPS, config(mean, std)).advantages_N
    for i, (reward, group) in enumerate(zip(REWARDS, GROUPS, strict=True)):
        sets = {"group": [r for r, g in zip(REWARDS, GROUPS, strict=True) if g == group], "batch": REWARDS}
        center = statistics.mean(sets[mean]) if mean in sets else 0.0
        scale = statistics.stdev(sets[std]) + EPS if std in sets else 1.0
        assert result[i].item() == pytest.approx((reward - center) / scale, rel=1e-6)


@pytest.mark.parametrize(
    ("mean", "std"), [("group", "group"), ("group", "none"), ("batch", "group"), ("none", "group")]
)
def test_a_group_without_variance_gets_exactly_zero_and_is_counted(mean: str, std: str) -> None:
    rewards = [0.1, 0.1, 0.1, 1.0, 0.2, 0.7, 0.3]
    result = compute_advantages(rewards, [0, 0, 0, 1, 1, 2, 2], config(mean, std))
    assert result.advantages_N[:3].tolist() == [0.0, 0.0, 0.0]
    assert result.advantages_N[3:].abs().min() > 0
    assert result.metrics["zero_variance_groups"] == pytest.approx(1 / 3)
    assert result.metrics["groups"] == 3


def test_a_batch_without_variance_gets_exactly_zero() -> None:
    for mean in ("batch", "none"):
        assert not compute_advantages([0.3] * 4, [0, 0, 1, 1], config(mean, "batch")).advantages_N.any()
    assert not compute_advantages([0.3] * 4, [0, 0, 1, 1], config("batch", "none")).advantages_N.any()
    assert compute_advantages([0.3] * 4, [0, 0, 1, 1], config("none", "none")).advantages_N.tolist() == pytest.approx(
        [0.3] * 4
    )


def test_a_group_of_one_gets_exactly_zero() -> None:
    result = compute_advantages([1.0, 0.0, 5.0], [0, 0, 1], config())
    assert result.advantages_N[2].item() == 0.0
    assert result.advantages_N.isfinite().all()


def test_rewards_are_biased_then_scaled_then_clipped() -> None:
    shaped = compute_advantages(
        [0.0, 1.0, 3.0], [0, 0, 0], config("none", "none", reward_bias=-0.5, reward_scaling=2.0, reward_clip=1.5)
    )
    assert shaped.advantages_N.tolist() == [-1.0, 1.0, 1.5]
    assert shaped.metrics["reward/max"] == 3.0
    assert shaped.metrics["reward/mean"] == pytest.approx(4 / 3)


def test_a_group_that_clipping_makes_constant_gets_exactly_zero() -> None:
    result = compute_advantages([2.0, 3.0, 0.0, 1.0], [0, 0, 1, 1], config("batch", "group", reward_clip=1.0))
    assert result.advantages_N[:2].tolist() == [0.0, 0.0]
    assert result.metrics["zero_variance_groups"] == 0.5


def test_rewards_that_are_not_finite_or_lack_a_group_are_errors() -> None:
    with pytest.raises(ValueError, match="reward 1 is nan"):
        compute_advantages([0.0, float("nan")], [0, 0], config())
    with pytest.raises(ValueError, match="2 rewards came with 1 group ids"):
        compute_advantages([0.0, 1.0], [0], config())


def test_kl_to_go_sums_the_kl_of_the_token_and_of_those_after_it() -> None:
    mask = torch.tensor([0.0, 1, 1, 1, 0, 0, 1])
    batch = Batch((4, 3), torch.zeros(7, dtype=torch.int64), mask)
    advantages = torch.tensor([2.0, 2, 2, 2, -1, -1, -1])
    kl = torch.tensor([float("nan"), 0.1, 0.2, 0.4, float("nan"), 9.0, 0.5])
    result = subtract_kl_to_go(advantages, kl, batch, kl_ctl=0.5)
    expected = [2 - 0.35, 2 - 0.35, 2 - 0.3, 2 - 0.2, -1 - 0.25, -1 - 0.25, -1 - 0.25]
    assert result.tolist() == pytest.approx(expected)
