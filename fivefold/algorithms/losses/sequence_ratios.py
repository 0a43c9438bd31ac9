"""GSPO and GMPO: the ratio of a whole sequence, the geometric mean over its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fivefold.algorithms.kl import bounded_exp
from fivefold.algorithms.loss import Sums
from fivefold.algorithms.losses.ppo import clip_metrics, clip_range
from fivefold.algorithms.sequences import PolicyTokens
from fivefold.algorithms.token_sums import count


@dataclass(frozen=True)
class GSPO:
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv 2507.18071).

    The ratio of sequence i is the geometric mean over its n tokens,

        s_i = exp(1/n sum_t (log p_t - log p_old,t))                                                    eq. 7

    and all its tokens cost max(-A s_i, -A clip(s_i, 1 - low, 1 + high)), eq. 5 with `sequence_mean`. The gradient goes
    through each token's own log p, eq. 14 (GSPO-token): s_it = sg(s_i) p_t / sg(p_t), which is the gradient of eq. 5
    where all tokens of a sequence have one advantage, and is defined where they have not.
    """

    eps_clip: float = 3e-4
    eps_clip_higher: float | None = 4e-4

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Sums]:
        low, high = clip_range(self.eps_clip, self.eps_clip_higher)
        mean_T = tokens.sequences.spread(tokens.sequences.mean(tokens.log_ratio_T.detach()))
        ratio_T = bounded_exp(mean_T + tokens.logprobs_T - tokens.logprobs_T.detach())
        advantages_T = tokens.advantages_T
        cost_T = torch.maximum(-advantages_T * ratio_T, -advantages_T * ratio_T.clamp(1.0 - low, 1.0 + high))
        return cost_T, clip_metrics(ratio_T, tokens, low, high)


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

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Sums]:
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
