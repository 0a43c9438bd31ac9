"""Divergence of a policy from a teacher, on the policy's own samples (on-policy distillation).

With p of the policy and q of the teacher, both at the temperature of sampling, each trained token t has

    sampled   A_t += coeff * (log q(t) - log p_old(t))         the reverse KL divergence as a reward of each token
    top_k     cost_t += coeff * D_t                            its exact value over the teacher's k most likely tokens

    reverse   D_t = KL(p || q) = sum_v p(v) (log p(v) - log q(v))          mode seeking
    forward   D_t = KL(q || p) = sum_v q(v) (log q(v) - log p(v))          mode covering

The first form has the gradient of the reverse divergence in expectation (Lu et al. 2025, "On-Policy Distillation",
Thinking Machines Lab). In the second one (Agarwal et al. 2024, arXiv 2306.13649, sections 3 and 4) v runs over the k
tokens, and over all others as if they were one token, so that D_t is a divergence of distributions: at least 0, never
more than over the whole vocabulary, and equal to it for k = all. The samples have no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Direction = Literal["reverse", "forward"]
Over = Literal["sampled", "top_k", "full"]

LEAST_REST = 1e-6
"""Least probability of all other tokens together: below it, float32 cannot tell it from 0, and it has no gradient."""


@dataclass(frozen=True)
class Distillation:
    """How a policy is drawn towards its teacher."""

    coeff: float
    """Weight of the divergence, in advantage or loss per nat."""
    over: Over = "sampled"
    """Tokens over which the divergence is taken."""
    direction: Direction = "reverse"


def coarse_divergence(logprobs_NK: torch.Tensor, teacher_NK: torch.Tensor, direction: Direction) -> torch.Tensor:
    """Return D_t of each place over k tokens and the rest, float [N], with gradient by the first argument.

    Args:
        logprobs_NK: log p of k tokens at each place.
        teacher_NK: log q of the same tokens, without gradient.
        direction: `reverse` or `forward`.
    """
    student_NK, teacher_NK = _with_rest(logprobs_NK), _with_rest(teacher_NK)
    if direction == "reverse":
        return (student_NK.exp() * (student_NK - teacher_NK)).sum(1)
    return (teacher_NK.exp() * (teacher_NK - student_NK)).sum(1)


def _with_rest(logprobs_NK: torch.Tensor) -> torch.Tensor:
    """Return the log-probs [N, k + 1] with the log-prob of all other tokens together."""
    rest_N1 = (1.0 - logprobs_NK.exp().sum(1, keepdim=True)).clamp(min=LEAST_REST).log()
    return torch.cat([logprobs_NK, rest_N1], 1)
