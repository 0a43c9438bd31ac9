"""PPO's clipped surrogate, with clip-higher and dual clip."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fivefold.algorithms.loss import Sums
from fivefold.algorithms.sequences import PolicyTokens
from fivefold.algorithms.token_sums import count


@dataclass(frozen=True)
class PPO:
    """Proximal policy optimisation.

    With ratio r = p / p_old and advantage A, a token costs

        max(-A r, -A clip(r, 1 - low, 1 + high))     PPO (Schulman et al. 2017, arXiv 1707.06347, eq. 7)
        min(that, -A c)          where A < 0         dual clip (Ye et al. 2020, arXiv 1912.09729, eq. 5)

    `high` above `low` is DAPO's clip-higher (Yu et al. 2025, arXiv 2503.14476, eq. 10).
    """

    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    """None: the same as `eps_clip`."""
    c_clip: float | None = None
    """None: no dual clip."""

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Sums]:
        low, high = clip_range(self.eps_clip, self.eps_clip_higher)
        ratio_T, advantages_T = tokens.ratio_T, tokens.advantages_T
        metrics = clip_metrics(ratio_T, tokens, low, high)
        cost_T = torch.maximum(-advantages_T * ratio_T, -advantages_T * ratio_T.clamp(1.0 - low, 1.0 + high))
        if self.c_clip is None:
            return cost_T, metrics
        bounded_T = torch.minimum(cost_T, -advantages_T * self.c_clip)
        metrics["clip_fraction_dual"] = count((ratio_T.detach() > self.c_clip) & (advantages_T < 0), ratio_T.detach())
        # The lower and the upper clip stop tokens with small ratios, or with positive advantages: none of these.
        metrics["clip_fraction"] = metrics["clip_fraction"] + metrics["clip_fraction_dual"]
        return torch.where(advantages_T < 0, bounded_T, cost_T), metrics


def clip_range(eps_clip: float, eps_clip_higher: float | None) -> tuple[float, float]:
    """Return how far a ratio may fall below 1 and rise above it."""
    return eps_clip, eps_clip if eps_clip_higher is None else eps_clip_higher


def clip_metrics(ratio_T: torch.Tensor, tokens: PolicyTokens, low: float, high: float) -> dict[str, torch.Tensor]:
    """Count the tokens that have no gradient, because their ratio is beyond [1 - low, 1 + high] on the far side."""
    ratio_T, advantages_T = ratio_T.detach(), tokens.advantages_T
    lower_T = (ratio_T < 1.0 - low) & (advantages_T < 0)
    upper_T = (ratio_T > 1.0 + high) & (advantages_T > 0)
    return {
        "clip_fraction": count(lower_T | upper_T, ratio_T),
        "clip_fraction_lower": count(lower_T, ratio_T),
        "clip_fraction_upper": count(upper_T, ratio_T),
    }
