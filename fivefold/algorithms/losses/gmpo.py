"""GMPO: the geometric mean of a sequence's clipped ratios."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fivefold.algorithms.kl import bounded_exp
from fivefold.algorithms.loss import Metrics, count
from fivefold.algorithms.losses.ppo import clip_range
from fivefold.algorithms.losses.surrogate import PolicyTokens


@dataclass(frozen=True)
class GMPO:
    """Geometric-mean policy optimisation (Zhao et al. 2025, arXiv 2507.20673, algorithm 1).

    Each token's log-ratio d is clipped on the side to which its advantage pushes it, and a sequence costs

        -A exp(mean_t d'_t)      d' = min(d, high) where A > 0, max(d, -low) where A < 0

    The bounds are of log-ratios: 0.4 stands for ratios in [e^-0.4, e^0.4]. A is the mean over the sequence's tokens,
    which usually have one advantage. Every token has the cost of its sequence: use `sequence_mean`.
    """

    eps_clip: float = 0.4
    eps_clip_higher: float | None = None

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Metrics]:
        low, high = clip_range(self.eps_clip, self.eps_clip_higher)
        log_ratio_T, advantages_T = tokens.log_ratio_T, tokens.advantages_T
        is_positive_T = advantages_T > 0
        clipped_T = torch.where(is_positive_T, log_ratio_T.clamp(max=high), log_ratio_T.clamp(min=-low))
        ratio_S = bounded_exp(tokens.sequences.mean(clipped_T))
        cost_S = -tokens.sequences.mean(advantages_T) * ratio_S
        lower_T = (log_ratio_T.detach() < -low) & (advantages_T < 0)
        upper_T = (log_ratio_T.detach() > high) & is_positive_T
        return tokens.sequences.spread(cost_S), {
            "clip_fraction": count(lower_T | upper_T, cost_S.detach()),
            "clip_fraction_lower": count(lower_T, cost_S.detach()),
            "clip_fraction_upper": count(upper_T, cost_S.detach()),
        }
