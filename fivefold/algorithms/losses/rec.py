"""REC: group-relative REINFORCE with a region of ratios, outside of which tokens cost nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field

from fivefold.algorithms.kl import bounded_exp
from fivefold.algorithms.loss import Metrics, count
from fivefold.algorithms.losses.ppo import clip_range
from fivefold.algorithms.losses.surrogate import PolicyTokens


@dataclass(frozen=True)
class REC:
    """The family of off-policy REINFORCE losses of Yao et al. 2025 (arXiv 2509.24203, sections 3 and 4).

    A token costs -I w A log p + `penalty_coeff` * penalty, without gradient through I and w. I is 1 in the region

        none        everywhere
        two_side    1 - low <= r <= 1 + high
        one_side    r <= 1 + high where A >= 0, r >= 1 - low where A <= 0          the gradient's region of PPO
        ring        two_side, or r <= 1 - ring_low where A >= 0, or r >= 1 + ring_high where A <= 0

    and 0 elsewhere. w is 1, the ratio r, or exp(A / `weight_temperature`). The penalty is (log p - log p_old)^2, as in
    OPMD, or -log p, which is KL(p_old, p) up to a constant, as in AsymRE.
    """

    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    region: Literal["none", "two_side", "one_side", "ring"] = "one_side"
    ring_low: Annotated[float, Field(gt=0, le=1)] = 0.6
    ring_high: Annotated[float, Field(gt=0)] = 2.0
    weight: Literal["none", "ratio", "advantage"] = "none"
    weight_temperature: Annotated[float, Field(gt=0)] = 1.0
    penalty: Literal["none", "k2", "forward_kl"] = "none"
    penalty_coeff: Annotated[float, Field(ge=0)] = 0.0

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Metrics]:
        ratio_T, advantages_T = tokens.ratio_T.detach(), tokens.advantages_T
        inside_T = self._inside(ratio_T, advantages_T)
        weight_T = torch.ones_like(ratio_T)
        if self.weight == "ratio":
            weight_T = ratio_T
        elif self.weight == "advantage":
            weight_T = bounded_exp(advantages_T / self.weight_temperature)
        weight_T = torch.where(inside_T, weight_T, torch.zeros_like(weight_T))
        cost_T = -weight_T * advantages_T * tokens.logprobs_T
        if self.penalty == "k2":
            cost_T = cost_T + self.penalty_coeff * tokens.log_ratio_T.square()
        elif self.penalty == "forward_kl":
            cost_T = cost_T - self.penalty_coeff * tokens.logprobs_T
        lower_T, upper_T = ~inside_T & (ratio_T < 1.0), ~inside_T & (ratio_T > 1.0)
        return cost_T, {
            "clip_fraction": count(lower_T | upper_T, ratio_T),
            "clip_fraction_lower": count(lower_T, ratio_T),
            "clip_fraction_upper": count(upper_T, ratio_T),
        }

    def _inside(self, ratio_T: torch.Tensor, advantages_T: torch.Tensor) -> torch.Tensor:
        low, high = clip_range(self.eps_clip, self.eps_clip_higher)
        above_T, below_T = ratio_T > 1.0 + high, ratio_T < 1.0 - low
        # Tokens that are not trained have an advantage and a log-ratio of 0, and are inside.
        match self.region:
            case "none":
                return torch.ones_like(above_T)
            case "one_side":
                return ~(above_T & (advantages_T > 0)) & ~(below_T & (advantages_T < 0))
            case "two_side":
                return ~above_T & ~below_T
            case "ring":
                far_below_T = (ratio_T <= 1.0 - self.ring_low) & (advantages_T >= 0)
                far_above_T = (ratio_T >= 1.0 + self.ring_high) & (advantages_T <= 0)
                return (~above_T & ~below_T) | far_below_T | far_above_T
