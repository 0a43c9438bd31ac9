"""Clip-B and Clip-V: bad tokens that would lower the entropy most when they are pushed down cost nothing.

S_t = p_old,t (H_old,t + log p_old,t) says how the entropy changes, to first order, when a token is trained on
(arXiv 2602.03392; `fivefold/engine/entropy_changes.py`). A token with A_t < 0 costs nothing if

    Clip-B:  S_t - mean S < -mu std S                   mean and deviation over the T tokens of the mini-batch
    Clip-V:  S_t - E S_t < -mu std(S - E S)             E over the vocabulary at token t

The authors' code computes both of the whole step. Here it is the mini-batch, before its first micro-batch, so that the
choice is the same on every layout and split. Its tokens still count in the divisor of the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from fivefold.algorithms.batch_steps import Gather
from fivefold.algorithms.imitation import policy_mask
from fivefold.algorithms.loss import Sums
from fivefold.algorithms.losses.covariance import largest_of
from fivefold.algorithms.losses.ppo import PPO
from fivefold.algorithms.sequences import PolicyTokens
from fivefold.batch import Batch

CLIPPED = "entropy_clipped"
"""Name of the field that is 1 on the tokens that are left out, else 0."""
LEAST_DEVIATION = 1e-12
"""Standard deviation below which all tokens count as equal."""


@dataclass(frozen=True)
class ClipB:
    """Clip-B (arXiv 2602.03392): PPO's cost, and 0 for tokens that are far below the mini-batch's mean."""

    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    c_clip: float | None = None
    mu: Annotated[float, Field(ge=0)] = 2.5

    @property
    def before(self) -> EntropyClip:
        """What chooses the tokens of a mini-batch."""
        return EntropyClip(self.mu, centred=True)

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Sums]:
        return _without_clipped(PPO(self.eps_clip, self.eps_clip_higher, self.c_clip), tokens)


@dataclass(frozen=True)
class ClipV:
    """Clip-V (arXiv 2602.03392): PPO's cost, and 0 for tokens that are far below the vocabulary's expectation.

    At most `max_share` of the mini-batch's tokens, but at least one, are left out: the lowest ones.
    """

    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    c_clip: float | None = None
    mu: Annotated[float, Field(ge=0)] = 8.5
    max_share: Annotated[float, Field(gt=0, le=1)] = 1e-4

    @property
    def before(self) -> EntropyClip:
        """What chooses the tokens of a mini-batch."""
        return EntropyClip(self.mu, centred=False, max_share=self.max_share)

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Sums]:
        return _without_clipped(PPO(self.eps_clip, self.eps_clip_higher, self.c_clip), tokens)


def _without_clipped(surrogate: PPO, tokens: PolicyTokens) -> tuple[torch.Tensor, Sums]:
    cost_T, metrics = surrogate(tokens)
    clipped_T = tokens.fields[CLIPPED].bool()
    return torch.where(clipped_T, torch.zeros_like(cost_T), cost_T), {
        **metrics,
        CLIPPED: clipped_T.to(cost_T.dtype).sum(),
    }


@dataclass(frozen=True)
class EntropyClip:
    """Chooses the tokens of negative advantage whose change of the entropy is far below the others'."""

    mu: float
    """Standard deviations below which a change must be."""
    centred: bool
    """Whether changes are compared with their mean over the mini-batch, and not with 0."""
    max_share: float = 1.0
    """Largest share of the trained tokens that are chosen; one may be in any case."""

    def __call__(self, batch: Batch, gather: Gather) -> Batch:
        """Return `batch` with the field `entropy_clipped`.

        Fields read: `entropy_changes`, `advantages`, and `sequence_number`.
        """
        trained_T = policy_mask(batch).bool()
        changes_T = torch.where(trained_T, batch.fields["entropy_changes"], 0.0).double()
        n, total = torch.stack(gather(torch.stack([trained_T.double().sum(), changes_T.sum()]))).sum(0).tolist()
        mean = total / max(1.0, n)
        squares = torch.where(trained_T, changes_T - mean, 0.0).square().sum()
        deviation = (float(torch.stack(gather(squares)).sum()) / max(1.0, n)) ** 0.5
        least = (mean if self.centred else 0.0) - self.mu * deviation
        is_low_T = trained_T & (batch.fields["advantages"] < 0) & (changes_T < least)
        if deviation < LEAST_DEVIATION:
            is_low_T = torch.zeros_like(is_low_T)
        clipped_T = largest_of(batch, -changes_T, is_low_T, max(1, int(self.max_share * n)), gather)
        return batch.with_fields(**{CLIPPED: clipped_T.to(batch.mask_T.dtype)})
