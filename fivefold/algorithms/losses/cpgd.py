"""CPGD: a clipped log-ratio, and a penalty on the drift from the old policy."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Annotated

import torch
from pydantic import Field

from fivefold.algorithms.kl import kl_estimate
from fivefold.algorithms.loss import Metrics
from fivefold.algorithms.losses.ppo import clip_range
from fivefold.algorithms.losses.surrogate import PolicyTokens, clip_metrics


@dataclass(frozen=True)
class CPGD:
    """Clipped policy gradient with policy drift (Liu et al. 2025, arXiv 2505.12504).

    With log-ratio d = log p - log p_old, a token costs

        max(-A d, -A clip(d, log(1 - low), log(1 + high))) + drift * (exp(d) - 1 - d)

    The drift term is k3 of KL(p_old, p), whose samples these are.
    """

    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    drift: Annotated[float, Field(ge=0)] = 1e-4

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Metrics]:
        low, high = clip_range(self.eps_clip, self.eps_clip_higher)
        least = log(1.0 - low) if low < 1.0 else -torch.inf
        log_ratio_T, advantages_T = tokens.log_ratio_T, tokens.advantages_T
        clipped_T = log_ratio_T.clamp(least, log(1.0 + high))
        cost_T = torch.maximum(-advantages_T * log_ratio_T, -advantages_T * clipped_T)
        drift_T = kl_estimate(torch.zeros_like(log_ratio_T), log_ratio_T, "k3")
        return cost_T + self.drift * drift_T, clip_metrics(tokens.ratio_T, tokens, low, high)
