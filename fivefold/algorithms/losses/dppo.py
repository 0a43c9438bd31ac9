"""DPPO: a trust region of probabilities, in the place of a clip of their ratio."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fivefold.algorithms.loss import Metrics, count
from fivefold.algorithms.losses.ppo import clip_range
from fivefold.algorithms.losses.surrogate import PolicyTokens

LARGEST_RATIO = 20.0
"""Largest weight of a token unless `c_clip` says otherwise."""
SMALLEST = 1e-12
"""Least 1 - p of which a logarithm is taken."""


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

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Metrics]:
        low, high = clip_range(self.eps_clip, self.eps_clip_higher)
        moved_T = tokens.logprobs_T.detach().exp() - tokens.old_logprobs_T.exp()
        return _inside(tokens, moved_T > high, moved_T < -low, self.c_clip)


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

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Metrics]:
        low, high = clip_range(self.eps_clip, self.eps_clip_higher)
        logprobs_T, old_T = tokens.logprobs_T.detach(), tokens.old_logprobs_T
        p_T, p_old_T = logprobs_T.exp(), old_T.exp()
        others_T = torch.log((1 - p_old_T).clamp(min=SMALLEST)) - torch.log((1 - p_T).clamp(min=SMALLEST))
        divergence_T = p_old_T * (old_T - logprobs_T) + (1 - p_old_T) * others_T
        return _inside(
            tokens, (divergence_T > high) & (p_T > p_old_T), (divergence_T > low) & (p_T < p_old_T), self.c_clip
        )


def _inside(
    tokens: PolicyTokens, above_T: torch.Tensor, below_T: torch.Tensor, c_clip: float | None
) -> tuple[torch.Tensor, Metrics]:
    """Return the costs, 0 where an update would go on in the direction in which the token is out of the region."""
    upper_T, lower_T = above_T & (tokens.advantages_T > 0), below_T & (tokens.advantages_T < 0)
    weight_T = tokens.ratio_T.detach().clamp(max=LARGEST_RATIO if c_clip is None else c_clip)
    weight_T = torch.where(upper_T | lower_T, torch.zeros_like(weight_T), weight_T)
    return -weight_T * tokens.advantages_T * tokens.logprobs_T, {
        "clip_fraction": count(upper_T | lower_T, weight_T),
        "clip_fraction_lower": count(lower_T, weight_T),
        "clip_fraction_upper": count(upper_T, weight_T),
    }
