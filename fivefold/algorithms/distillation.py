"""Divergence of a policy from a teacher, on the policy's own samples (on-policy distillation).

With p of the policy and q of the teacher, both at the temperature of sampling, each trained token t has

    sampled   A_t += coeff * (log q(t) - log p_old(t))         the reverse KL divergence as a reward of each token
    top_k     cost_t += coeff * D_t                            its exact value over the teacher's k most likely tokens

    reverse   D_t = KL(p || q) = sum_v p(v) (log p(v) - log q(v))          mode seeking
    forward   D_t = KL(q || p) = sum_v q(v) (log q(v) - log p(v))          mode covering
    mixed     D_t = beta KL(q || p) + (1 - beta) KL(p || q)
    jsd       D_t = beta KL(q || m) + (1 - beta) KL(p || m), m = beta q + (1 - beta) p

The first form has the gradient of the reverse divergence in expectation (Lu et al. 2025, "On-Policy Distillation",
Thinking Machines Lab). In the second one (GKD: Agarwal et al. 2024, arXiv 2306.13649, sections 2 to 4) v runs over the
k tokens, and over all others as if they were one token, so that D_t is a divergence of distributions: at least 0, never
more than over the whole vocabulary, and equal to it for k = all. The samples have no gradient. The generalized
Jensen-Shannon divergence `jsd` is bounded; divided by beta it tends to the forward divergence as beta goes to 0, and
divided by 1 - beta to the reverse one as beta goes to 1.

Of several teachers, a token has the weighted mean: with the weights w_i of the teachers of its row, which sum to 1,

    sampled   A_t += coeff * sum_i w_i (log q_i(t) - log p_old(t))
    top_k     cost_t += coeff * sum_i w_i D_t(p, q_i), each over its own k tokens
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Direction = Literal["reverse", "forward", "mixed", "jsd"]
Over = Literal["sampled", "top_k", "full"]

LOGPROBS, WEIGHT = "teacher_logprobs", "teacher_weight"
"""Fields of a row's teacher: log q of the sampled tokens, and w_i."""
LEAST_REST = 1e-6
"""Least probability of all other tokens together: below it, float32 cannot tell it from 0, and it has no gradient."""


@dataclass(frozen=True)
class Distillation:
    """How a policy is drawn towards its teachers."""

    coeff: float
    """Weight of the divergence, in advantage or loss per nat."""
    over: Over = "sampled"
    """Tokens over which the divergence is taken."""
    direction: Direction = "reverse"
    """The divergence over several tokens."""
    beta: float = 0.5
    """beta of `mixed` and `jsd`, above 0 and below 1."""
    most: float | None = None
    """Largest size of a token's divergence from a teacher, in nats: a larger one counts as this, without gradient."""
    least_logprob: float | None = None
    """Log-prob as which smaller ones of the k tokens count, the policy's without gradient."""
    n_teachers: int = 1
    """Most teachers of a row. Of several, the fields `teacher_weight`, `teacher_weight/1` and so on have the w_i."""

    def capped(self, divergence_T: torch.Tensor) -> torch.Tensor:
        """Return divergences, or log q - log p at sampled tokens, of at most the largest size, float [T]."""
        return divergence_T if self.most is None else divergence_T.clamp(-self.most, self.most)

    def between(self, logprobs_NK: torch.Tensor, teacher_NK: torch.Tensor) -> torch.Tensor:
        """Return D_t over k tokens and the rest (`coarse_divergence`), within this object's bounds, float [N]."""
        if self.least_logprob is not None:
            logprobs_NK, teacher_NK = (each.clamp(min=self.least_logprob) for each in (logprobs_NK, teacher_NK))
        return self.capped(coarse_divergence(logprobs_NK, teacher_NK, self.direction, self.beta))

    def places(self, name: str, fields: Mapping[str, torch.Tensor]) -> Iterator[tuple[int, float | torch.Tensor]]:
        """Yield each place among a row's teachers that has the column `name`, counted from 0, and w_i of its tokens."""
        for place in range(self.n_teachers):
            if at(name, place) in fields:
                yield place, fields[at(WEIGHT, place)] if self.n_teachers > 1 else 1.0


def at(name: str, place: int) -> str:
    """Return the name of a column of a row's teacher at `place` among its teachers, counted from 0."""
    return f"{name}/{place}" if place else name


def coarse_divergence(
    logprobs_NK: torch.Tensor, teacher_NK: torch.Tensor, direction: Direction, beta: float = 0.5
) -> torch.Tensor:
    """Return D_t of each place over k tokens and the rest, float [N], with gradient by the first argument.

    Args:
        logprobs_NK: log p of k tokens at each place.
        teacher_NK: log q of the same tokens, without gradient.
        direction: the divergence.
        beta: as above, of `mixed` and `jsd`.
    """
    p_NK, q_NK = _with_rest(logprobs_NK), _with_rest(teacher_NK)
    match direction:
        case "reverse":
            return kl(p_NK, q_NK)
        case "forward":
            return kl(q_NK, p_NK)
        case "mixed":
            return beta * kl(q_NK, p_NK) + (1.0 - beta) * kl(p_NK, q_NK)
        case "jsd":
            middle_NK = torch.logaddexp(q_NK + math.log(beta), p_NK + math.log1p(-beta))
            return beta * kl(q_NK, middle_NK) + (1.0 - beta) * kl(p_NK, middle_NK)


def kl(a_NE: torch.Tensor, b_NE: torch.Tensor) -> torch.Tensor:
    """Return KL(a || b) of the log-probs of E events at each place, float [N]."""
    return (a_NE.exp() * (a_NE - b_NE)).sum(1)


def _with_rest(logprobs_NK: torch.Tensor) -> torch.Tensor:
    """Return the log-probs [N, k + 1] with the log-prob of all other tokens together."""
    rest_N1 = (1.0 - logprobs_NK.exp().sum(1, keepdim=True)).clamp(min=LEAST_REST).log()
    return torch.cat([logprobs_NK, rest_N1], 1)
