"""From rewards to advantages, against Python's `statistics` and numbers computed by hand."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

from fivefold.algorithms.advantages.compute import Advantages, Outcomes, compute_advantages
from fivefold.algorithms.build import build_advantage
from fivefold.algorithms.kl_in_reward import subtract_kl_to_go
from fivefold.algorithms.reward_shaping import RewardShaping
from fivefold.batch import Batch
from fivefold.config.schema.roles import ActorConfig, NormConfig
from fivefold.config.schema.rollout import GenerationConfig

EPS = 1e-6


def config(mean: str = "group", std: str = "group", **options: Any) -> ActorConfig:
    return ActorConfig(path="m", reward_norm=NormConfig(mean_level=mean, std_level=std, eps=EPS), **options)  # type: ignore[arg-type]


def computed(
    rewards: list[float], groups: list[int], actor: ActorConfig, lengths: list[int] | None = None, limit: int = 100
) -> Advantages:
    outcomes = Outcomes(rewards, groups, lengths or [5] * len(rewards))
    shaping = RewardShaping.of(actor, GenerationConfig(max_new_tokens=limit))
    return compute_advantages(outcomes, shaping, build_advantage(actor, 2))


@pytest.mark.parametrize(
    ("mean", "std"), [("group", "group"), ("group", "none"), ("batch", "group"), ("none", "group")]
)
def test_a_group_without_variance_gets_exactly_zero_and_is_counted(mean: str, std: str) -> None:
    rewards = [0.1, 0.1, 0.1, 1.0, 0.2, 0.7, 0.3]
    result = computed(rewards, [0, 0, 0, 1, 1, 2, 2], config(mean, std))
    assert result.advantages_N[:3].tolist() == [0.0, 0.0, 0.0]
    assert result.advantages_N[3:].abs().min() > 0
    assert result.metrics["zero_variance_groups"] == pytest.approx(1 / 3)
    assert result.metrics["groups"] == 3


def test_gdpo_normalises_each_reward_of_a_group_by_itself() -> None:
    """Two rewards are for the first prompt, one of them and a penalty on length for both."""
    right, brief = [1.0, 0.0, 0.0, 1.0], [0.0, 10.0, 0.0, 10.0, 0.0, 20.0]
    parts = [{"right": r, "brief": b} for r, b in zip(right, brief[:4], strict=True)]
    parts += [{"brief": b} for b in brief[4:]]
    weights, lengths, groups = {"right": 2.0, "brief": 0.5}, [10, 20, 30, 40, 50, 50], [0, 0, 0, 0, 1, 1]
    actor = config(advantage="gdpo", length_penalty=1.0)
    outcomes = Outcomes([0.0] * 6, groups, lengths, parts, weights)
    shaping = RewardShaping.of(actor, GenerationConfig(max_new_tokens=100))
    result = compute_advantages(outcomes, shaping, build_advantage(actor, 2)).advantages_N

    def normal(values: list[float]) -> list[float]:
        return [(v - statistics.mean(values)) / (statistics.stdev(values) + EPS) for v in values]

    first = zip(normal(right), normal(brief[:4]), normal([-0.1, -0.2, -0.3, -0.4]), strict=True)
    sums = [2.0 * r + 0.5 * b + penalty for r, b, penalty in first]
    # The lengths of the second group are equal.
    sums += [0.5 * b for b in normal(brief[4:])]
    assert result.tolist() == pytest.approx(normal(sums), rel=1e-5)


def test_a_batch_without_variance_gets_exactly_zero() -> None:
    for mean in ("batch", "none"):
        assert not computed([0.3] * 4, [0, 0, 1, 1], config(mean, "batch")).advantages_N.any()
    assert not computed([0.3] * 4, [0, 0, 1, 1], config("batch", "none")).advantages_N.any()
    result = computed([0.3] * 4, [0, 0, 1, 1], config("none", "none"))
    assert result.advantages_N.tolist() == pytest.approx([0.3] * 4)


@pytest.mark.parametrize(
    "advantage", ["grpo", "gdpo", "rloo", "opo", "opmd", "gpg", "reinforce_pp_baseline", "pass_at_k_best"]
)
def test_a_group_without_signal_has_advantages_of_exactly_zero(advantage: str) -> None:
    rewards = [0.1, 0.1, 0.1, 1.0, 0.2, 0.7]
    result = computed(rewards, [0, 0, 0, 1, 1, 2], config(advantage=advantage), [3, 5, 7, 1, 2, 4])
    assert result.advantages_N[[0, 1, 2, 5]].tolist() == [0.0] * 4
    assert result.advantages_N[3] > 0


def test_rewards_are_biased_then_scaled_then_clipped() -> None:
    shaped = computed(
        [0.0, 1.0, 3.0], [0, 0, 0], config("none", "none", reward_bias=-0.5, reward_scaling=2.0, reward_clip=1.5)
    )
    assert shaped.advantages_N.tolist() == [-1.0, 1.0, 1.5]
    assert shaped.metrics["reward/max"] == 3.0
    assert shaped.metrics["reward/mean"] == pytest.approx(4 / 3)
    assert "reward/penalty" not in shaped.metrics


def test_a_group_that_clipping_makes_constant_gets_exactly_zero() -> None:
    result = computed([2.0, 3.0, 0.0, 1.0], [0, 0, 1, 1], config("batch", "group", reward_clip=1.0))
    assert result.advantages_N[:2].tolist() == [0.0, 0.0]
    assert result.metrics["zero_variance_groups"] == 0.5


def test_overlong_completions_are_punished_before_rewards_are_scaled() -> None:
    actor = config("none", "none", overlong_reward_penalty=True, overlong_tokens=40, reward_scaling=2.0)
    result = computed([1.0] * 5, [0] * 5, actor, lengths=[10, 60, 70, 90, 100])
    # DAPO's eq. 13 with L_max = 100 and L_cache = 40: ((100 - 40) - l) / 40 between 60 and 100.
    assert result.advantages_N.tolist() == pytest.approx([2.0, 2.0, 1.5, 0.5, 0.0])
    assert result.metrics["reward/penalty"] == pytest.approx((0.25 + 0.75 + 1.0) / 5)
    assert result.metrics["reward/mean"] == 1.0
    fifth = config("none", "none", overlong_reward_penalty=True, overlong_penalty_factor=0.5)
    assert computed([0.0] * 3, [0] * 3, fifth, lengths=[80, 90, 100]).advantages_N.tolist() == [0.0, -0.25, -0.5]


def test_a_length_penalty_grows_with_the_length() -> None:
    result = computed([1.0] * 3, [0] * 3, config("none", "none", length_penalty=0.4), lengths=[0, 50, 100])
    assert result.advantages_N.tolist() == pytest.approx([1.0, 0.8, 0.6])


def test_remax_compares_with_the_shaped_reward_of_the_greedy_completion() -> None:
    actor = ActorConfig(path="m", advantage="remax", reward_scaling=2.0)
    shaping = RewardShaping.of(actor, GenerationConfig())
    greedy = Outcomes([0.5, 0.0], [9, 7], [1, 1])
    result = compute_advantages(
        Outcomes([1.0, 0.0, 1.0], [7, 9, 9], [1, 1, 1]), shaping, build_advantage(actor, 1), greedy
    )
    assert result.advantages_N.tolist() == [2.0, -1.0, 1.0]
    with pytest.raises(ValueError, match="none were generated"):
        computed([1.0, 0.0], [0, 0], actor)


def test_rewards_that_are_not_finite_or_lack_a_group_are_errors() -> None:
    with pytest.raises(ValueError, match="reward 1 is nan"):
        computed([0.0, float("nan")], [0, 0], config())
    with pytest.raises(ValueError, match=r"not finite in float32, .* up to 1e\+39; if that is too large, set"):
        computed([0.0, 1e39], [0, 0], config("group", "none"))
    with pytest.raises(ValueError, match="2 rewards came with 1 group ids"):
        computed([0.0, 1.0], [0], config())


@pytest.mark.parametrize("k", [4, 5])
def test_k_is_below_the_size_of_a_group(k: int) -> None:
    with pytest.raises(ValueError, match=rf"(?s)actor.advantage=pass_at_k failed .*k={k} completions.*group of 4"):
        build_advantage(config(advantage="pass_at_k", advantage_kwargs={"k": k}), 4)


def test_kl_to_go_sums_the_kl_of_the_token_and_of_those_after_it() -> None:
    mask = torch.tensor([0.0, 1, 1, 1, 0, 0, 1])
    batch = Batch((4, 3), torch.zeros(7, dtype=torch.int64), mask)
    advantages = torch.tensor([2.0, 2, 2, 2, -1, -1, -1])
    kl = torch.tensor([float("nan"), 0.1, 0.2, 0.4, float("nan"), 9.0, 0.5])
    result = subtract_kl_to_go(advantages, kl, batch, kl_ctl=0.5)
    expected = [2 - 0.35, 2 - 0.35, 2 - 0.3, 2 - 0.2, -1 - 0.25, -1 - 0.25, -1 - 0.25]
    assert result.tolist() == pytest.approx(expected)


def test_a_replica_without_sequences_has_no_advantages_after_a_kl_penalty() -> None:
    nothing = torch.empty(0)
    empty = Batch((), torch.empty(0, dtype=torch.int64), nothing)
    assert subtract_kl_to_go(nothing, nothing, empty, kl_ctl=0.5).shape == (0,)
