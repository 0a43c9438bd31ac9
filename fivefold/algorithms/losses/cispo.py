"""CISPO: the weight of each token is clipped, and every token keeps its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fivefold.algorithms.loss import Metrics, count
from fivefold.algorithms.losses.ppo import clip_range
from fivefold.algorithms.losses.surrogate import PolicyTokens


@dataclass(frozen=True)
class CISPO:
    """Clipped importance-sampling weights (MiniMax 2025, arXiv 2506.13585, eq. 4 and 5).

    A token costs -sg(clip(r, 1 - low, 1 + high)) A log p. `low` of 1 is no lower bound, as in the paper.
    """

    eps_clip: float = 1.0
    eps_clip_higher: float | None = 4.0

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Metrics]:
        low, high = clip_range(self.eps_clip, self.eps_clip_higher)
        ratio_T = tokens.ratio_T.detach()
        lower_T, upper_T = ratio_T < 1.0 - low, ratio_T > 1.0 + high
        cost_T = -ratio_T.clamp(1.0 - low, 1.0 + high) * tokens.advantages_T * tokens.logprobs_T
        return cost_T, {
            "clip_fraction": count(lower_T | upper_T, ratio_T),
            "clip_fraction_lower": count(lower_T, ratio_T),
            "clip_fraction_upper": count(upper_T, ratio_T),
        }
