"""Generalised advantage estimation (Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 11 to 16).

With values V_t of the state before trained token t, of n trained tokens of a sequence, and rewards r_t:

    delta_t = r_t + gamma * V_{t+1} - V_t          V_{n+1} = 0: nothing has value after the end
    A_t     = delta_t + gamma * lam * A_{t+1}      A_{n+1} = 0
    return  = A_t + V_t                            what the critic learns to predict

lam may follow the completion's length l, and may differ for the returns (VAPO: Yue et al. 2025, arXiv
2504.05118, sections 4.1 and 4.2; VC-PPO: arXiv 2503.01491):

    lam = 1 - 1 / (alpha l)                        so that the mean length of the sum is in proportion to l

The completion's reward belongs to its last trained token, but for the part that a reward function has given to single
tokens, which the field `token_rewards` has; a KL penalty is a reward of every token. Tokens that are not
trained, such as a tool's answer, are no steps: the next trained token follows the one before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from fivefold.algorithms.kl_in_reward import KLInReward
from fivefold.batch import Batch

TOKEN_REWARDS = "token_rewards"
"""Name of the field with the rewards of single tokens."""


@dataclass(frozen=True)
class GAE:
    """The constants of generalised advantage estimation."""

    gamma: float
    """Discount of the reward of the next token."""
    lam: float
    """Weight of longer against shorter estimates: 1 is Monte Carlo, 0 is one step of temporal difference."""
    returns_lam: float | None = None
    """lam of the returns; None: as for the advantages."""
    length_alpha: float | None = None
    """alpha, by which lam of the advantages follows the length; None: it is `lam`."""

    def estimate(self, batch: Batch, token_rewards_T: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return advantages and returns, float32 [T] each, 0 on tokens that are not trained.

        Args:
            batch: its fields `values` and `rewards` are read; the latter has the completion's reward on each token. If
                it has `token_rewards`, they are parts of it that single tokens have earned.
            token_rewards_T: further rewards of single tokens, [T].
        """
        trained_T = batch.mask_T.bool()
        counts = [int(mask.sum()) for mask in batch.split(trained_T)]
        rewards_SL = _padded(torch.zeros_like(batch.mask_T) if token_rewards_T is None else token_rewards_T, batch)
        last = [(row, count - 1) for row, count in enumerate(counts) if count]
        if last:
            rows, columns = (torch.tensor(index) for index in zip(*last, strict=True))
            rewards_SL[rows, columns] += _padded(batch.fields["rewards"], batch)[rows, columns]
            if TOKEN_REWARDS in batch.fields:
                own_SL = _padded(batch.fields[TOKEN_REWARDS], batch)
                rewards_SL += own_SL
                rewards_SL[rows, columns] -= own_SL.sum(1)[rows]
        values_SL = _padded(batch.fields["values"], batch)
        lam_S = self._lam(torch.tensor(counts, dtype=torch.float64))
        above_SL = advantages_SL = self._sweep(rewards_SL, values_SL, lam_S)
        if self.returns_lam is not None:
            above_SL = self._sweep(rewards_SL, values_SL, torch.full_like(lam_S, self.returns_lam))
        is_step_SL = torch.arange(rewards_SL.shape[1]) < torch.tensor(counts)[:, None]
        advantages_T, returns_T = (torch.zeros(batch.n_tokens) for _ in range(2))
        advantages_T[trained_T] = advantages_SL[is_step_SL].float()
        returns_T[trained_T] = (above_SL + values_SL)[is_step_SL].float()
        return advantages_T, returns_T

    def _lam(self, counts_S: torch.Tensor) -> torch.Tensor:
        """Return float64 [S]: lam of sequences with so many trained tokens."""
        if self.length_alpha is None:
            return torch.full_like(counts_S, self.lam)
        return (1.0 - 1.0 / (self.length_alpha * counts_S.clamp(min=1))).clamp(min=0.0)

    def _sweep(self, rewards_SL: torch.Tensor, values_SL: torch.Tensor, lam_S: torch.Tensor) -> torch.Tensor:
        """Return the advantages [S, L] of sequences that are padded after their end with rewards and values of 0."""
        advantages_SL = torch.zeros_like(values_SL)
        next_value_S = next_advantage_S = values_SL.new_zeros(len(values_SL))
        for step in reversed(range(values_SL.shape[1])):
            delta_S = rewards_SL[:, step] + self.gamma * next_value_S - values_SL[:, step]
            next_advantage_S = delta_S + self.gamma * lam_S * next_advantage_S
            next_value_S = values_SL[:, step]
            advantages_SL[:, step] = next_advantage_S
        return advantages_SL


def _padded(values_T: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the trained tokens' values of each sequence, float64 [sequences, most trained tokens], padded with 0."""
    pairs = zip(batch.split(values_T), batch.split(batch.mask_T), strict=True)
    rows = [values[mask.bool()].double() for values, mask in pairs]
    if not rows:
        return torch.zeros(0, 0, dtype=torch.float64)
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@dataclass(frozen=True)
class Moments:
    """Number, mean and squared deviations of values, which parts of a batch can be merged of."""

    n: int
    mean: float
    squares: float
    """Sum of the squared deviations from the mean."""

    @staticmethod
    def of(values: torch.Tensor) -> Moments:
        """Return the moments of all elements, computed in float64."""
        if values.numel() == 0:
            return Moments(0, 0.0, 0.0)
        mean = values.double().mean()
        return Moments(values.numel(), float(mean), float((values.double() - mean).square().sum()))

    @staticmethod
    def merged(parts: Iterable[Moments]) -> Moments:
        """Return the moments of all parts together (Chan et al. 1983)."""
        parts = [part for part in parts if part.n]
        n = sum(part.n for part in parts)
        if n == 0:
            return Moments(0, 0.0, 0.0)
        mean = math.fsum(part.n * part.mean for part in parts) / n
        squares = math.fsum(part.squares + part.n * (part.mean - mean) ** 2 for part in parts)
        return Moments(n, mean, squares)

    @property
    def variance(self) -> float:
        """Variance of the values themselves (divided by n)."""
        return self.squares / max(1, self.n)

    @property
    def std(self) -> float:
        """Standard deviation of a sample (divided by n - 1)."""
        return math.sqrt(self.squares / max(1, self.n - 1))


@dataclass(frozen=True)
class EstimateMoments:
    """Moments of what GAE estimates for the trained tokens of a step."""

    advantages: Moments
    returns: Moments
    errors: Moments
    """Moments of return - value, which differs from the advantage if the returns have a separate lambda."""

    @staticmethod
    def of(batch: Batch) -> EstimateMoments:
        """Return the moments over the trained tokens of `batch`, which has `advantages`, `returns` and `values`."""
        trained_T = batch.mask_T.bool()
        advantages_N, returns_N, values_N = (
            batch.fields[name][trained_T].double() for name in ("advantages", "returns", "values")
        )
        return EstimateMoments(Moments.of(advantages_N), Moments.of(returns_N), Moments.of(returns_N - values_N))

    @staticmethod
    def merged(parts: Sequence[EstimateMoments]) -> EstimateMoments:
        """Return the moments of all parts together."""
        return EstimateMoments(
            Moments.merged(part.advantages for part in parts),
            Moments.merged(part.returns for part in parts),
            Moments.merged(part.errors for part in parts),
        )

    @property
    def mean_value(self) -> float:
        """Mean of the values."""
        return self.returns.mean - self.errors.mean

    @property
    def explained_variance(self) -> float:
        """1 - Var(return - value) / Var(return): 1 for a perfect critic, 0 for a constant, below 0 for a worse one.

        Returns that are all equal leave nothing to explain: 0.
        """
        return 1.0 - self.errors.variance / self.returns.variance if self.returns.variance > 0 else 0.0


@dataclass(frozen=True)
class Estimates:
    """Estimates the advantages and the returns of a batch, with a penalty in the reward of each token, if any."""

    gae: GAE
    kl: KLInReward | None = None

    def __call__(self, batch: Batch) -> tuple[EstimateMoments, dict[str, torch.Tensor]]:
        """Return moments over the trained tokens, and the columns `advantages` and `returns`."""
        token_rewards_T = None if self.kl is None else -self.kl.kl_ctl * self.kl.estimate(batch)
        advantages_T, returns_T = self.gae.estimate(batch, token_rewards_T)
        columns = {"advantages": advantages_T, "returns": returns_T}
        return EstimateMoments.of(batch.with_fields(**columns)), columns


SOURCE = "source"
"""Name of the scalar that is the number of a sequence's data source."""


@dataclass(frozen=True)
class AdvantageMoments:
    """Moments of the advantages of a batch's trained tokens, as they are after `change`."""

    change: Callable[[Batch], Batch]
    n_sources: int | None = None
    """Number of data sources whose moments are separate, by the field `source`; None: there is one for all tokens."""

    def __call__(self, batch: Batch) -> tuple[list[Moments], dict[str, torch.Tensor]]:
        """Return the moments, of each source if they are separate, and no column."""
        advantages_T, trained_T = self.change(batch).fields["advantages"], batch.mask_T.bool()
        sources = [None] if self.n_sources is None else range(self.n_sources)
        return [Moments.of(advantages_T[of_source(batch, trained_T, source)]) for source in sources], {}


@dataclass(frozen=True)
class Whitening:
    """Brings the advantages of all trained tokens of a step to mean 0 and standard deviation 1.

    As in verl and TRL, they are divided by sqrt(std^2 + eps), so that advantages that differ by rounding alone stay far
    below 1: to divide by the deviation alone would make a signal of it.
    """

    mean: float
    std: float
    eps: float = 1e-8
    """Added to the variance."""
    source: int | None = None
    """The data source whose tokens are changed, by the field `source`; None: all are."""

    def applied(self, batch: Batch) -> Batch:
        """Return `batch` with its `advantages` whitened; tokens that are not trained keep 0."""
        advantages_T, trained_T = batch.fields["advantages"], batch.mask_T.bool()
        white_T = (advantages_T - self.mean) / math.sqrt(self.std**2 + self.eps)
        changed_T = torch.where(of_source(batch, trained_T, self.source), white_T, advantages_T)
        return batch.with_fields(advantages=torch.where(trained_T, changed_T, torch.zeros_like(white_T)))


def of_source(batch: Batch, trained_T: torch.Tensor, source: int | None) -> torch.Tensor:
    """Return which trained tokens are of a data source (bool [T]); None: all of them."""
    return trained_T if source is None else trained_T & (batch.fields[SOURCE] == source)
