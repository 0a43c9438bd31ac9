"""What an advantage is computed from: the rewards of a step's completions, and their groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

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
