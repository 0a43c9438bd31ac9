"""A KL penalty that is part of the reward of each token instead of the loss (`actor.kl_in: reward`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fivefold.algorithms.kl import KLEstimator, kl_estimate
from fivefold.batch import Batch


@dataclass(frozen=True)
class KLInReward:
    """A KL penalty that is part of the reward instead of the loss (`kl_in=reward`)."""

    kl_ctl: float
    """Weight of the penalty, in advantage per nat."""
    estimator: KLEstimator

    def subtracted(self, batch: Batch) -> Batch:
        """Return `batch` with the penalty subtracted from its `advantages`.

        The penalty is the KL from the policy that sampled, by `old_logprobs` (`rollout_logprobs` if the batch lacks
        them), to the reference, by `ref_logprobs`.
        """
        kl_T = self.estimate(batch)
        return batch.with_fields(advantages=subtract_kl_to_go(batch.fields["advantages"], kl_T, batch, self.kl_ctl))

    def estimate(self, batch: Batch) -> torch.Tensor:
        """Return the KL estimate of each token, [T], without its weight."""
        sampled_T = batch.fields.get("old_logprobs", batch.fields["rollout_logprobs"])
        return kl_estimate(sampled_T, batch.fields["ref_logprobs"], self.estimator)


def subtract_kl_to_go(advantages_T: torch.Tensor, kl_T: torch.Tensor, batch: Batch, kl_ctl: float) -> torch.Tensor:
    """Return the advantages when the KL penalty is part of the reward instead of the loss (`kl_in=reward`).

    Token t of a completion earns -kl_ctl * KL_t. The undiscounted sum of these rewards from t on, which token t can
    still influence, is added to the completion's advantage:

        A_t = A - kl_ctl * sum over trained tokens s >= t of KL_s

    The KL term is not normalised with the rewards: kl_ctl keeps its unit (advantage per nat) whatever their spread.

    Args:
        advantages_T: float32 [T]: on each token, the advantage of its completion.
        kl_T: float32 [T]: the KL estimate of each token under the policy that sampled it, without gradient.
        batch: the sequences; its mask says which tokens count.
        kl_ctl: weight of the penalty.

    Returns:
        float32 [T].
    """
    counted_T = torch.where(batch.mask_T.bool(), kl_T, torch.zeros_like(kl_T))
    to_go = [kl.flip(0).cumsum(0).flip(0) for kl in batch.split(counted_T)]
    # A replica may have no sequence.
    return advantages_T - kl_ctl * torch.cat([*to_go, counted_T[:0]])
