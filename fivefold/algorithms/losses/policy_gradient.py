"""Losses whose gradient is a weight times the policy gradient: -w A log p, with w constant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field

from fivefold.algorithms.kl import bounded_exp
from fivefold.algorithms.loss import Sums
from fivefold.algorithms.losses.ppo import clip_range
from fivefold.algorithms.sequences import PolicyTokens
from fivefold.algorithms.token_sums import count

LARGEST_RATIO = 20.0
"""Largest weight of a token unless `c_clip` says otherwise."""
SMALLEST = 1e-12
"""Least 1 - p in a logarithm."""


@dataclass(frozen=True)
class Reinforce:
    """The policy gradient without ratios (Williams 1992, https://doi.org/10.1007/BF00992696).

    A token costs -A log p. RLOO, ReMax, OPO and GPG are this loss with other advantages. It is exact if each
    step has one update; further ones would train on the samples of an older policy as if they were the policy's own.
    """

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Sums]:
        return -tokens.advantages_T * tokens.logprobs_T, {}


@dataclass(frozen=True)
class CISPO:
    """Clipped importance-sampling weights (MiniMax 2025, arXiv 2506.13585, eq. 4 and 5).

    A token costs -sg(clip(r, 1 - low, 1 + high)) A log p. `low` of 1 is no lower bound, as in the paper.
    """

    eps_clip: float = 1.0
    eps_clip_higher: float | None = 4.0

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Sums]:
        low, high = clip_range(self.eps_clip, self.eps_clip_higher)
        ratio_T = tokens.ratio_T.detach()
        lower_T, upper_T = ratio_T < 1.0 - low, ratio_T > 1.0 + high
        cost_T = -ratio_T.clamp(1.0 - low, 1.0 + high) * tokens.advantages_T * tokens.logprobs_T
        return cost_T, {
            "clip_fraction": count(lower_T | upper_T, ratio_T),
            "clip_fraction_lower": count(lower_T, ratio_T),
            "clip_fraction_upper": count(upper_T, ratio_T),
        }


@dataclass(frozen=True)
class TOPR:
    """Tapered off-policy REINFORCE (Le Roux et al. 2025, arXiv 2503.14286).

    A token costs -w A log p. Where A > 0, w is `positive_weight`; elsewhere it is `negative_weight` times the ratio of
    the whole sequence, truncated to [0, 1]:

        w = negative_weight * sg(min(1, exp(sum_t (log p_t - log p_old,t))))
    """

    positive_weight: Annotated[float, Field(ge=0)] = 1.0
    negative_weight: Annotated[float, Field(ge=0)] = 1.0

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Sums]:
        taper_S = bounded_exp(tokens.sequences.sum(tokens.log_ratio_T.detach()).clamp(max=0.0))
        taper_T = tokens.sequences.spread(taper_S)
        positive_T = torch.full_like(taper_T, self.positive_weight)
        weight_T = torch.where(tokens.advantages_T > 0, positive_T, self.negative_weight * taper_T)
        return -weight_T * tokens.advantages_T * tokens.logprobs_T, {}


@dataclass(frozen=True)
class DPPOTV:
    """Divergence PPO with binary total variation (arXiv 2602.04879).

    A token costs -sg(min(r, c)) A log p, and nothing if the update would leave the trust region: if A > 0 and
    p - p_old > high, or A < 0 and p_old - p > low. A rare token may so change by a large ratio, a likely one may not.
    """

    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    c_clip: float | None = None
    """c; None: 20."""

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Sums]:
        low, high = clip_range(self.eps_clip, self.eps_clip_higher)
        moved_T = tokens.logprobs_T.detach().exp() - tokens.old_logprobs_T.exp()
        return _with_region(tokens, moved_T > high, moved_T < -low, self.c_clip)


@dataclass(frozen=True)
class DPPOKL:
    """Divergence PPO with binary KL (arXiv 2602.04879).

    As with total variation, and the trust region is D <= high where p > p_old, D <= low where p < p_old, for the
    divergence of "this token" against "any other":

        D = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))
    """

    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    c_clip: float | None = None
    """c; None: 20."""

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Sums]:
        low, high = clip_range(self.eps_clip, self.eps_clip_higher)
        logprobs_T, old_T = tokens.logprobs_T.detach(), tokens.old_logprobs_T
        p_T, p_old_T = logprobs_T.exp(), old_T.exp()
        others_T = torch.log((1 - p_old_T).clamp(min=SMALLEST)) - torch.log((1 - p_T).clamp(min=SMALLEST))
        divergence_T = p_old_T * (old_T - logprobs_T) + (1 - p_old_T) * others_T
        return _with_region(
            tokens, (divergence_T > high) & (p_T > p_old_T), (divergence_T > low) & (p_T < p_old_T), self.c_clip
        )


def _with_region(
    tokens: PolicyTokens, above_T: torch.Tensor, below_T: torch.Tensor, c_clip: float | None
) -> tuple[torch.Tensor, Sums]:
    """Return the costs, 0 where an update would push a token further out of the region."""
    upper_T, lower_T = above_T & (tokens.advantages_T > 0), below_T & (tokens.advantages_T < 0)
    weight_T = tokens.ratio_T.detach().clamp(max=LARGEST_RATIO if c_clip is None else c_clip)
    weight_T = torch.where(upper_T | lower_T, torch.zeros_like(weight_T), weight_T)
    return -weight_T * tokens.advantages_T * tokens.logprobs_T, {
        "clip_fraction": count(upper_T | lower_T, weight_T),
        "clip_fraction_lower": count(lower_T, weight_T),
        "clip_fraction_upper": count(upper_T, weight_T),
    }


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

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Sums]:
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
