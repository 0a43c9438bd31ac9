"""The likelihood of given responses as a further term of a policy's loss: an expert's, or the policy's own right ones.

    loss = (1 - mu) policy loss + mu 1/M sum_expert w_t (-log p_t) + positive_nll_coeff 1/P sum_right (-log p_t)
    GKD    (1 - mu) policy loss + mu 1/M sum_expert c D_t         + the same

over the trained tokens t of a mini-batch: M of the expert's responses (or the mean over sequences of their token
means), P of the completions that count as right. mu is a constant in MIX (Trinity-RFT), and falls in CHORD (Zhang et
al. 2025, arXiv 2508.11408), whose token weight w_t = p_t (1 - p_t), without gradient, is small for tokens that are
certain or unlikely. The term of right completions comes from VAPO (Yue et al. 2025, arXiv
2504.05118, section 4.3). With GKD (arXiv 2306.13649, section 3), an expert's tokens have c times the divergence D_t
from their teachers (`distillation.py`) in place of their likelihood.

An expert's responses are further sequences of the mini-batch. The policy loss sees none of their tokens, and its
divisors do not count them. The field `nll_weight` has, on each token of a sequence, its factor of -log p times the
divisor of the policy loss, by which the engine divides the sum of all terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from fivefold.algorithms.loss import LossInputs
from fivefold.algorithms.metrics import Metrics
from fivefold.algorithms.token_sums import means, zero_unless
from fivefold.batch import Batch

EXPERT = "is_expert"
"""Name of the field that is 1 on the tokens of an expert's sequences, else 0."""
NLL_WEIGHT = "nll_weight"
"""Name of the field with the factor of each token's -log p; 0 where it is no term of the loss."""

TokenWeight = Literal["one", "p", "phi"]


@dataclass(frozen=True)
class Imitation:
    """How given responses are a term of the loss of a mini-batch that has the fields `is_expert` and `nll_weight`."""

    policy_weight: float = 1.0
    """Factor of the policy loss."""
    token_weight: TokenWeight = "one"
    """w_t of an expert's token: 1, p_t, or p_t (1 - p_t)."""
    teacher_coeff: float | None = None
    """c, with which an expert's tokens cost the head's prediction `divergence`; None: they cost -log p."""

    def __call__(
        self, inputs: LossInputs, policy: Callable[[LossInputs], tuple[torch.Tensor, Metrics]]
    ) -> tuple[torch.Tensor, Metrics]:
        """Return the sum of all terms over a micro-batch, and the metrics; `policy` is the policy loss."""
        total, metrics = policy(replace(inputs, mask_T=inputs.mask_T * (1.0 - inputs.fields[EXPERT])))
        trained_T = inputs.mask_T.bool()
        logprobs_T = zero_unless(trained_T, inputs.predictions["logprobs"])
        weight_T = zero_unless(trained_T, inputs.fields[NLL_WEIGHT])
        cost_T = -logprobs_T * self._token_weights(logprobs_T.detach(), inputs.fields[EXPERT])
        is_term_T = weight_T > 0
        own = means({"imitation_nll": zero_unless(is_term_T, -logprobs_T.detach()).sum()}, is_term_T)
        if self.teacher_coeff is not None:
            expert_T = inputs.fields[EXPERT].bool() & trained_T
            divergence_T = zero_unless(expert_T, inputs.predictions["divergence"])
            cost_T = torch.where(expert_T, self.teacher_coeff * divergence_T, cost_T)
            own |= means({"imitation_teacher_kl": divergence_T.detach().sum()}, expert_T)
        return self.policy_weight * total + (weight_T * cost_T).sum(), metrics | own

    def _token_weights(self, logprobs_T: torch.Tensor, expert_T: torch.Tensor) -> torch.Tensor:
        p_T = logprobs_T.exp()
        match self.token_weight:
            case "one":
                return torch.ones_like(p_T)
            case "p":
                weight_T = p_T
            case "phi":
                weight_T = p_T * (1.0 - p_T)
        return torch.where(expert_T.bool(), weight_T, torch.ones_like(p_T))


@dataclass(frozen=True)
class ExpertWeight:
    """mu, the expert's share of the loss, by step: a linear rise, then a cosine fall (CHORD)."""

    peak: float
    final: float
    warmup_steps: int = 0
    decay_steps: int = 0

    def __call__(self, step: int) -> float:
        """Return mu of a training step, counted from 1."""
        done = step - 1
        if done < self.warmup_steps:
            return self.peak * done / self.warmup_steps
        falling = done - self.warmup_steps
        if falling >= self.decay_steps:
            return self.final
        return self.final + (self.peak - self.final) * 0.5 * (1.0 + math.cos(math.pi * falling / self.decay_steps))


def policy_mask(batch: Batch) -> torch.Tensor:
    """Return [T]: the mask of a batch with 0 on the tokens of an expert's sequences, which no policy has sampled."""
    return batch.mask_T * (1.0 - batch.fields[EXPERT]) if EXPERT in batch.fields else batch.mask_T
