"""From the rewards of a step's completions to their advantages.

reward R of each completion
  -> shaped       R' = clip((R - length penalties + bias) * scaling)           fivefold/algorithms/reward_shaping.py
  -> advantage    A, by `actor.advantage`                                      the other files of this folder
  -> per token    A_t = A, minus the KL of the tokens from t on, if the KL is part of the reward; whitened if wanted
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from fivefold.algorithms.reward_shaping import RewardShaping

ROUNDING = 1e-12
"""Difference of two values, as a share of the larger one or of 1, that rounding may make: the same rewards, added up in
another order, need not have the same sum."""


@dataclass(frozen=True)
class Each:
    """K rewards of N completions, and penalties on length as one more."""

    rewards_NK: torch.Tensor
    """float64 [N, K]; NaN: the reward is not for the completion's prompt."""
    weights_K: torch.Tensor
    """float64 [K]: factor of each reward in the sum."""


@dataclass(frozen=True)
class Scores:
    """N completions of a step, in groups of one prompt each; the order is free."""

    rewards_N: torch.Tensor
    """float64 [N]: rewards, shaped."""
    groups_N: torch.Tensor
    """int64 [N]: group of each completion, numbered from 0."""
    lengths_N: torch.Tensor
    """int64 [N]: sampled tokens of each completion."""
    baselines_N: torch.Tensor | None = None
    """float64 [N]: shaped reward of the greedy completion of the same prompt; None: there are none."""
    each: Each | None = None
    """The rewards one by one; None: there is only the shaped one."""

    @property
    def parts_NK(self) -> torch.Tensor:
        """float64 [N, K]: K rewards of each completion, which are not shaped if there are several; NaN: it has none."""
        return self.rewards_N.unsqueeze(1) if self.each is None else self.each.rewards_NK

    @property
    def weights_K(self) -> torch.Tensor:
        """float64 [K]: factor of each reward in the sum."""
        return self.rewards_N.new_ones(1) if self.each is None else self.each.weights_K

    @property
    def of_group(self) -> Sets:
        """Statistics of the rewards over the group of each completion."""
        return Sets(self.rewards_N, self.groups_N)

    @property
    def of_batch(self) -> Sets:
        """Statistics of the rewards over all completions."""
        return Sets(self.rewards_N, torch.zeros_like(self.groups_N))


class Advantage(Protocol):
    """A method: a function with options."""

    def __call__(self, scores: Scores, /, **options: Any) -> torch.Tensor:
        """Return one advantage for each completion: floating point [N], finite."""


class Sets:
    """Statistics of the set that each of N values belongs to."""

    def __init__(self, values_N: torch.Tensor, sets_N: torch.Tensor) -> None:
        """`sets_N`: int64, the set of each value, numbered from 0."""
        n_sets = int(sets_N.max()) + 1
        self.sets_N = sets_N
        self.count_N = values_N.new_zeros(n_sets).index_add_(0, sets_N, torch.ones_like(values_N))[sets_N]
        """Number of values of the set."""
        self.mean_N = self.sum(values_N) / self.count_N
        # A set of one value is constant, and its standard deviation is not used.
        self.std_N = (self.sum((values_N - self.mean_N).square()) / (self.count_N - 1).clamp(min=1)).sqrt()
        """Standard deviation of a sample (divided by n - 1)."""
        least_S = values_N.new_zeros(n_sets).scatter_reduce_(0, sets_N, values_N, "amin", include_self=False)
        most_S = values_N.new_zeros(n_sets).scatter_reduce_(0, sets_N, values_N, "amax", include_self=False)
        self.most_N = most_S[sets_N]
        """Largest value of the set."""
        largest_S = torch.maximum(least_S.abs(), most_S.abs()).clamp(min=1.0)
        self.is_constant_S = most_S - least_S <= ROUNDING * largest_S
        """Whether all values of each set are equal, but for rounding."""
        self.is_constant_N = self.is_constant_S[sets_N]
        self._least_N, self._rounding_N = least_S[sets_N], (ROUNDING * largest_S)[sets_N]
        self._values_N = values_N

    @property
    def others_constant_N(self) -> torch.Tensor:
        """bool [N]: whether the other values of the set are equal, but for rounding; of none or one they are."""
        is_least_N = self._values_N - self._least_N <= self._rounding_N
        is_most_N = self.most_N - self._values_N <= self._rounding_N
        n_least_N, n_most_N = self.sum(is_least_N.to(self.mean_N)), self.sum(is_most_N.to(self.mean_N))
        alone_N = (is_least_N & (n_most_N == self.count_N - 1)) | (is_most_N & (n_least_N == self.count_N - 1))
        return self.is_constant_N | alone_N

    def sum(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return [N]: for each value, the sum over its set."""
        n_sets = int(self.sets_N.max()) + 1
        return values_N.new_zeros(n_sets).index_add_(0, self.sets_N, values_N)[self.sets_N]

    def zero_if_constant(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the values with exactly 0 in sets that hold no signal, in the place of rounding errors."""
        return torch.where(self.is_constant_N, torch.zeros_like(values_N), values_N)


@dataclass(frozen=True)
class Outcomes:
    """N completions, as the step has generated them."""

    rewards: Sequence[float]
    """Reward of each, as the reward function returned it."""
    groups: Sequence[int]
    """An id of each one's prompt, in any order."""
    lengths: Sequence[int]
    """Sampled tokens of each."""
    parts: Sequence[Mapping[str, float]] = ()
    """The rewards of each by name, whose weighted sums are `rewards`; empty: there is only one."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Factors of the rewards in the sum, by name."""

    def __post_init__(self) -> None:
        if not self.rewards or not len(self.rewards) == len(self.groups) == len(self.lengths):
            raise ValueError(
                f"{len(self.rewards)} rewards came with {len(self.groups)} group ids and {len(self.lengths)} lengths: "
                "pass one of each for every completion"
            )


@dataclass(frozen=True)
class Advantages:
    """One advantage for each completion, and metrics of the rewards."""

    advantages_N: torch.Tensor
    """float32 [N]."""
    metrics: dict[str, float]
    """`reward/{mean,std,min,max}` before shaping, `reward/penalty` if there are length penalties,
    `advantage/{mean,std}`, `groups`, and `zero_variance_groups`: the share of groups whose shaped rewards are all
    equal, which teach nothing under group normalisation."""


def compute_advantages(
    outcomes: Outcomes,
    shaping: RewardShaping | None,
    method: Callable[[Scores], torch.Tensor],
    greedy: Outcomes | None = None,
) -> Advantages:
    """Shape the rewards of one step's completions, and compute their advantages.

    Args:
        outcomes: the completions.
        shaping: how rewards are shaped; None: they stay as they are.
        method: the advantage.
        greedy: the greedy completion of each group, for methods with such a baseline.

    Raises:
        ValueError: a reward that is not finite, or a result of the method that is not a finite number a completion.
    """
    raw_N = _finite(outcomes.rewards)
    lengths_N = torch.tensor(outcomes.lengths)
    numbers = {group: number for number, group in enumerate(dict.fromkeys(outcomes.groups))}
    groups_N = torch.tensor([numbers[group] for group in outcomes.groups])
    shaped_N = raw_N if shaping is None else shaping(raw_N, lengths_N)
    scores = Scores(shaped_N, groups_N, lengths_N, each=_each(outcomes, shaping, lengths_N))
    if greedy is not None:
        greedy_G = _finite(greedy.rewards)
        if shaping is not None:
            greedy_G = shaping(greedy_G, torch.tensor(greedy.lengths))
        baselines = dict(zip(greedy.groups, greedy_G.tolist(), strict=True))
        scores = replace(
            scores, baselines_N=torch.tensor([baselines[group] for group in outcomes.groups], dtype=torch.float64)
        )
    advantages_N = method(scores)
    check_result("actor.advantage", advantages_N, scores)
    constant_G = scores.of_group.is_constant_S
    metrics = {
        "reward/mean": raw_N.mean().item(),
        "reward/std": raw_N.std(correction=0).item(),
        "reward/min": raw_N.min().item(),
        "reward/max": raw_N.max().item(),
        "advantage/mean": advantages_N.double().mean().item(),
        "advantage/std": advantages_N.double().std(correction=0).item(),
        "groups": float(len(constant_G)),
        "zero_variance_groups": constant_G.double().mean().item(),
    }
    if shaping is not None and shaping.has_penalty:
        metrics["reward/penalty"] = shaping.penalty(lengths_N).mean().item()
    return Advantages(advantages_N.float(), metrics)


def _each(outcomes: Outcomes, shaping: RewardShaping | None, lengths_N: torch.Tensor) -> Each | None:
    if not outcomes.parts:
        return None
    rows = [[part.get(name, math.nan) for name in outcomes.weights] for part in outcomes.parts]
    rewards_NK, weights = torch.tensor(rows, dtype=torch.float64), list(outcomes.weights.values())
    if shaping is not None and shaping.has_penalty:
        rewards_NK = torch.cat([rewards_NK, -shaping.penalty(lengths_N).unsqueeze(1)], dim=1)
        weights.append(1.0)
    return Each(rewards_NK, torch.tensor(weights, dtype=torch.float64))


def _finite(rewards: Sequence[float]) -> torch.Tensor:
    # float64: the mean of equal float32 rewards need not equal them, and eps would then decide their advantage.
    rewards_N = torch.tensor(rewards, dtype=torch.float64)
    if not rewards_N.isfinite().all():
        bad = int((~rewards_N.isfinite()).nonzero()[0])
        raise ValueError(f"reward {bad} is {rewards[bad]}: rewards must be finite numbers; correct the reward function")
    return rewards_N


def check_result(key: str, result: object, scores: Scores) -> None:
    """Refuse a result that is not one finite number for each completion.

    Raises:
        ValueError: it is something else.
    """
    wanted = tuple(scores.rewards_N.shape)
    if not isinstance(result, torch.Tensor) or tuple(result.shape) != wanted or not result.is_floating_point():
        found = f"{result.dtype} {tuple(result.shape)}" if isinstance(result, torch.Tensor) else type(result).__name__
        raise ValueError(f"{key} returned {found}: return a floating-point tensor of shape {wanted}, one a completion")
    if not result.float().isfinite().all():
        raise ValueError(
            f"{key} returned an advantage that is not finite in float32, for finite rewards: their sizes are up to "
            f"{float(scores.rewards_N.abs().max()):.2g}; if that is too large, set actor.reward_scaling or reward_clip"
        )
