"""Clip-Cov and KL-Cov: a few tokens with a large covariance of log-prob and advantage keep the entropy up.

A token's covariance (Cui et al. 2025, arXiv 2505.22617) is over the T tokens of the mini-batch:

    cov_t = (log p_old,t - mean log p_old) (A_t - mean A)

The papers' code takes log p and a micro-batch in place of log p_old and the mini-batch; the choice would then
depend on the layout. With p_old it is made once, before the mini-batch's first micro-batch, and is the same on every
layout and split. For the first update of a step, p is p_old.
"""

from __future__ import annotations

import math
import random
import sys
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field

from fivefold.algorithms.batch_steps import Gather
from fivefold.algorithms.imitation import policy_mask
from fivefold.algorithms.loss import Sums
from fivefold.algorithms.losses.ppo import PPO
from fivefold.algorithms.sequences import PolicyTokens
from fivefold.batch import Batch

CHOSEN = "covariance_chosen"
"""Name of the field that is 1 on the tokens that were chosen, else 0."""
NUMBER = "sequence_number"
"""Name of the field with the number of each token's sequence, by which random tokens are drawn."""
ABOVE_0 = sys.float_info.min
"""Least covariance that counts as larger than 0."""
MOST_NUMBERS = 2**24
"""Whole numbers from 0 on that float32 holds exactly."""


@dataclass(frozen=True)
class ClipCov:
    """Clip-Cov (Cui et al. 2025, arXiv 2505.22617).

    A token costs what it costs in PPO; of the tokens whose covariance is in [`clip_cov_lb`, `clip_cov_ub`], as many as
    `clip_cov_ratio` of all are drawn at random, and cost 0. `CovarianceChoice` says what the covariance is.
    """

    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    clip_cov_ratio: Annotated[float, Field(gt=0, le=1)] = 2e-4
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0

    @property
    def before(self) -> CovarianceChoice:
        """What chooses the tokens of a mini-batch."""
        return CovarianceChoice(self.clip_cov_ratio, self.clip_cov_lb, self.clip_cov_ub, at_random=True)

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Sums]:
        cost_T, metrics = PPO(self.eps_clip, self.eps_clip_higher)(tokens)
        chosen_T = tokens.fields[CHOSEN].bool()
        return torch.where(chosen_T, torch.zeros_like(cost_T), cost_T), {
            **metrics,
            "covariance_chosen": chosen_T.to(cost_T.dtype).sum(),
        }


@dataclass(frozen=True)
class KLCov:
    """KL-Cov (Cui et al. 2025, arXiv 2505.22617).

    A token costs -A r, without a clip; of all tokens, the `kl_cov_ratio` with the largest covariance, if it is above 0,
    cost `ppo_kl_coef` * |log p - log p_old| more. `CovarianceChoice` says what the covariance is.
    """

    kl_cov_ratio: Annotated[float, Field(gt=0, le=1)] = 2e-4
    ppo_kl_coef: Annotated[float, Field(ge=0)] = 1.0

    @property
    def before(self) -> CovarianceChoice:
        """What chooses the tokens of a mini-batch."""
        return CovarianceChoice(self.kl_cov_ratio)

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Sums]:
        chosen_T = tokens.fields[CHOSEN].to(tokens.logprobs_T.dtype)
        cost_T = -tokens.advantages_T * tokens.ratio_T + self.ppo_kl_coef * chosen_T * tokens.log_ratio_T.abs()
        return cost_T, {"covariance_chosen": chosen_T.sum()}


@dataclass(frozen=True)
class CovarianceChoice:
    """Chooses a share of the trained tokens: those with the largest covariance, or random ones within bounds."""

    share: float
    """Share of the trained tokens, at least one of them, that are chosen if so many are within the bounds."""
    low: float = ABOVE_0
    """Least covariance; by default any above 0, so that tokens whose advantages are all equal are not all chosen."""
    high: float = math.inf
    at_random: bool = False

    def __call__(self, batch: Batch, gather: Gather) -> Batch:
        """Return `batch` with the field `covariance_chosen`.

        Tokens of equal covariance, such as all of probability 1 in the best sequences, are chosen at random.

        Fields read: `old_logprobs` (`rollout_logprobs` if there are none), `advantages`, and `sequence_number`.
        """
        trained_T = policy_mask(batch).bool()
        covariance_T, n_trained = _covariances(batch, trained_T, gather)
        inside_T = trained_T & (covariance_T >= self.low) & (covariance_T <= self.high)
        score_T = torch.zeros_like(covariance_T) if self.at_random else covariance_T
        chosen_T = largest_of(batch, score_T, inside_T, max(1, int(self.share * n_trained)), gather)
        return batch.with_fields(**{CHOSEN: chosen_T.to(batch.mask_T.dtype)})


def largest_of(
    batch: Batch, score_T: torch.Tensor, among_T: torch.Tensor, n_chosen: int, gather: Gather
) -> torch.Tensor:
    """Return bool [T]: the `n_chosen` tokens with the largest scores of the tokens `among_T` of all replicas.

    All of them are chosen if they are fewer. Of equal scores, those that are too many are left out at random.
    """
    least = _least_of_largest(score_T, among_T, n_chosen, gather)
    above_T, equal_T = among_T & (score_T > least), among_T & (score_T == least)
    n_above = int(torch.stack(gather(above_T.sum())).sum())
    number_T = random_numbers(batch)
    return above_T | (equal_T & (number_T >= _least_of_largest(number_T, equal_T, n_chosen - n_above, gather)))


def _least_of_largest(score_T: torch.Tensor, among_T: torch.Tensor, n: int, gather: Gather) -> float:
    """Return the least of the `n` largest scores of the tokens `among_T` of all replicas, or of all if they are fewer.

    It is infinite if there is no such token.
    """
    own = score_T[among_T]
    best = torch.cat(gather(own.topk(min(n, len(own))).values)).sort(descending=True).values
    return best[min(n, len(best)) - 1].item() if len(best) else math.inf


def _covariances(batch: Batch, trained_T: torch.Tensor, gather: Gather) -> tuple[torch.Tensor, int]:
    """Return float64 [T], and the number of trained tokens of all replicas."""
    zero_T = torch.zeros(len(trained_T), dtype=torch.float64)
    # With `recompute_logprob: false`, the rollout's log-probs are the old ones.
    old = "old_logprobs" if "old_logprobs" in batch.fields else "rollout_logprobs"
    logprobs_T, advantages_T = (
        torch.where(trained_T, batch.fields[name].double(), zero_T) for name in (old, "advantages")
    )
    own = torch.stack([trained_T.double().sum(), logprobs_T.sum(), advantages_T.sum()])
    n_trained, logprob, advantage = torch.stack(gather(own)).sum(0).tolist()
    n_trained = max(1.0, n_trained)
    return (logprobs_T - logprob / n_trained) * (advantages_T - advantage / n_trained), int(n_trained)


def sequence_numbers(seed: str, n: int) -> npt.NDArray[np.float32]:
    """Return float32 [n], numbers for the sequences of a step, each once.

    Args:
        seed: differs from step to step, so that the same places in a batch are not drawn again and again.
        n: number of sequences.
    """
    first = random.Random(seed).randrange(max(1, MOST_NUMBERS - n))
    return np.arange(first, first + n, dtype=np.float32)


def random_numbers(batch: Batch) -> torch.Tensor:
    """Return float64 [T], numbers in [0, 1) that depend on a token's sequence and its place in it alone."""
    place_T = torch.cat([torch.arange(length) for length in batch.lengths] or [torch.arange(0)])
    mixed_T = batch.fields[NUMBER].long() * 0x9E3779B1 + place_T * 0x85EBCA77
    for factor in (0x2C1B3C6D, 0x297A2D39):
        mixed_T = ((mixed_T ^ (mixed_T >> 15)) & 0xFFFFFFFF) * factor
    return ((mixed_T ^ (mixed_T >> 15)) & 0xFFFFFFFF).double() / 2**32
