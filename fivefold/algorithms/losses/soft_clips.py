"""Losses with a smooth function or a penalty where PPO has its clip."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Annotated

import torch
from pydantic import Field

from fivefold.algorithms.kl import kl_estimate
from fivefold.algorithms.loss import Sums
from fivefold.algorithms.losses.ppo import clip_metrics, clip_range
from fivefold.algorithms.sequences import PolicyTokens


@dataclass(frozen=True)
class SAPO:
    """Soft adaptive policy optimisation (Gao et al. 2025, arXiv 2511.20347).

    A token costs -A f(r) with the soft gate

        f(r) = 4/tau * sigmoid(tau (r - 1))      tau = tau_pos where A > 0, tau_neg elsewhere

    whose slope is 1 at r = 1 and falls smoothly on both sides.
    """

    tau_pos: Annotated[float, Field(gt=0)] = 1.0
    tau_neg: Annotated[float, Field(gt=0)] = 1.05

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Sums]:
        advantages_T, ratio_T = tokens.advantages_T, tokens.ratio_T
        tau_T = torch.where(
            advantages_T > 0, torch.full_like(ratio_T, self.tau_pos), torch.full_like(ratio_T, self.tau_neg)
        )
        return -advantages_T * (4.0 / tau_T) * torch.sigmoid(tau_T * (ratio_T - 1.0)), {}


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

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Sums]:
        low, high = clip_range(self.eps_clip, self.eps_clip_higher)
        least = log(1.0 - low) if low < 1.0 else -torch.inf
        log_ratio_T, advantages_T = tokens.log_ratio_T, tokens.advantages_T
        clipped_T = log_ratio_T.clamp(least, log(1.0 + high))
        cost_T = torch.maximum(-advantages_T * log_ratio_T, -advantages_T * clipped_T)
        drift_T = kl_estimate(torch.zeros_like(log_ratio_T), log_ratio_T, "k3")
        return cost_T + self.drift * drift_T, clip_metrics(tokens.ratio_T, tokens, low, high)


@dataclass(frozen=True)
class Kimi:
    """Online policy mirror descent (Kimi team 2025, arXiv 2501.12599, section 2.3.2).

    A sequence costs -A log p(sequence) + tau/2 (log p(sequence) - log p_old(sequence))^2, with A the reward minus the
    group's mean. Both terms are written over its tokens: token t costs -A log p_t + tau/2 D d_t, where d_t is its
    log-ratio and D = sum_t d_t.
    """

    tau: Annotated[float, Field(ge=0)] = 0.1

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Sums]:
        log_ratio_T = tokens.log_ratio_T
        whole_T = tokens.sequences.spread(tokens.sequences.sum(log_ratio_T))
        return -tokens.advantages_T * tokens.logprobs_T + 0.5 * self.tau * whole_T * log_ratio_T, {}
