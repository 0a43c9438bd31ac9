"""Terms of a policy's loss that are off by default; `PolicyLoss` says where each belongs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fivefold.algorithms.distillation import LOGPROBS, Distillation, at
from fivefold.algorithms.kl import KLEstimator, kl_estimate
from fivefold.algorithms.loss import Sums
from fivefold.algorithms.sequences import PolicyTokens
from fivefold.algorithms.token_sums import count, zero_unless


def closeness(
    distillation: Distillation, fields: Mapping[str, torch.Tensor], old_T: torch.Tensor, trained_T: torch.Tensor
) -> torch.Tensor:
    """Return the sum over teachers of w_i (log q_i - log p_old) at each sampled token; 0 where nothing is trained."""
    closer_T = torch.zeros_like(old_T)
    for place, weight in distillation.places(LOGPROBS, fields):
        closer_T = closer_T + weight * distillation.capped(zero_unless(trained_T, fields[at(LOGPROBS, place)] - old_T))
    return closer_T


def without_drifted(cost_T: torch.Tensor, tokens: PolicyTokens, delta: float) -> tuple[torch.Tensor, Sums]:
    """Return the costs with 0 in sequences of a negative advantage whose mean of log p_old - log p is above delta.

    Off-policy sequence masking (DeepSeek-AI 2025, arXiv 2512.02556, section 3.1). Where tokens have advantages of their
    own, their mean decides for the whole sequence.
    """
    sequences = tokens.sequences
    drift_S, advantage_S = sequences.mean(-tokens.log_ratio_T.detach()), sequences.mean(tokens.advantages_T)
    drifted_T = tokens.trained_T & sequences.spread((advantage_S < 0) & (drift_S > delta))
    return zero_unless(~drifted_T, cost_T), {"opsm_masked": count(drifted_T, tokens.advantages_T)}


def with_kl(
    cost_T: torch.Tensor,
    tokens: PolicyTokens,
    fields: Mapping[str, torch.Tensor],
    coeff: float,
    estimator: KLEstimator,
    *,
    unbiased: bool,
    clip: float | None = None,
) -> tuple[torch.Tensor, Sums]:
    """Return the costs plus coeff * KL(p, p_ref).

    Args:
        cost_T: cost of each token.
        tokens: the tokens.
        fields: the batch's fields; `ref_logprobs` is read.
        coeff: weight of the divergence; at 0, it is measured alone.
        estimator: estimator of the divergence.
        unbiased: whether KL is multiplied by p / p_old, with gradient (DeepSeek-AI 2025, arXiv 2512.02556, section
            3.1): it then has the gradient of the divergence, whatever sampled the tokens.
        clip: largest size of a token's estimate, in nats; None: any. What is measured is not clipped.

    Raises:
        ValueError: the batch has no log-probs of the reference.
    """
    if "ref_logprobs" not in fields:
        raise ValueError(
            f"the loss has a KL penalty (actor.kl_ctl={coeff}), but the batch has no `ref_logprobs` field "
            f"(it has {sorted(fields)}): compute the reference's log-probs, or set actor.kl_ctl=0"
        )
    kl_T = kl_estimate(tokens.logprobs_T, fields["ref_logprobs"], estimator)
    clipped_T = kl_T if clip is None else kl_T.clamp(-clip, clip)
    weighted_T = clipped_T * tokens.ratio_T if unbiased else clipped_T
    return (cost_T + coeff * weighted_T if coeff else cost_T), {"kl_ref": kl_T.detach().sum()}
