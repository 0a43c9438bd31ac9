"""M2PO's mask: the tokens with the largest importance weights are left out until their second moment is small.

Second-moment trust policy optimisation (Zheng et al. 2025, arXiv 2510.01161) bounds, over all trained tokens of a
mini-batch that are kept,

    M2 = mean over kept tokens of (log w_t)^2 <= bound          w_t = p_old,t / q_t

by leaving out as few tokens as that needs, those with the largest (log w_t)^2. A sum of log w_t would cancel where some
are above 0 and others below; their squares do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fivefold.algorithms.batch_steps import Gather
from fivefold.algorithms.imitation import policy_mask
from fivefold.types import Batch

KEPT_TOKENS = "second_moment_kept"
"""Name of the field that is 1 on the tokens that are kept, else 0."""


@dataclass(frozen=True)
class SecondMomentMask:
    """Chooses the tokens of a mini-batch that are kept."""

    bound: float
    """Largest second moment of the kept tokens."""

    def __call__(self, batch: Batch, gather: Gather) -> Batch:
        """Return `batch` with the field `second_moment_kept`.

        Fields read: `old_logprobs` and `rollout_logprobs`.
        """
        trained_T = policy_mask(batch).bool()
        log_w_T = batch.fields["old_logprobs"].double() - batch.fields["rollout_logprobs"].double()
        square_T = torch.where(trained_T, log_w_T, torch.zeros_like(log_w_T)).square()
        most = largest_kept(torch.cat(gather(square_T[trained_T])), self.bound)
        return batch.with_fields(**{KEPT_TOKENS: (trained_T & (square_T <= most)).to(batch.mask_T.dtype)})


def largest_kept(squares_N: torch.Tensor, bound: float) -> float:
    """Return the largest value that is kept, so that the mean of those up to it is at most `bound`; -inf: none is kept.

    Equal values are kept or left out together, so that the choice does not depend on their order.
    """
    ascending_N = squares_N.sort().values
    counts_N = torch.arange(1, len(ascending_N) + 1, device=squares_N.device)
    n_kept = int((ascending_N.cumsum(0) / counts_N <= bound).sum())
    if n_kept == 0:
        return -math.inf
    if n_kept < len(ascending_N) and ascending_N[n_kept] == ascending_N[n_kept - 1]:
        smaller_N = ascending_N[ascending_N < ascending_N[n_kept]]
        return float(smaller_N[-1]) if len(smaller_N) else -math.inf
    return float(ascending_N[n_kept - 1])
