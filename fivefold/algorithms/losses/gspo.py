"""GSPO: the ratio of a whole sequence is clipped."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fivefold.algorithms.kl import bounded_exp
from fivefold.algorithms.loss import Metrics
from fivefold.algorithms.losses.ppo import clip_range
from fivefold.algorithms.losses.surrogate import PolicyTokens, clip_metrics


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

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Metrics]:
        low, high = clip_range(self.eps_clip, self.eps_clip_higher)
        mean_T = tokens.sequences.spread(tokens.sequences.mean(tokens.log_ratio_T.detach()))
        ratio_T = bounded_exp(mean_T + tokens.logprobs_T - tokens.logprobs_T.detach())
        advantages_T = tokens.advantages_T
        cost_T = torch.maximum(-advantages_T * ratio_T, -advantages_T * ratio_T.clamp(1.0 - low, 1.0 + high))
        return cost_T, clip_metrics(ratio_T, tokens, low, high)
