"""Clip-Cov: a few tokens of large covariance have no gradient, so that the entropy stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from fivefold.algorithms.loss import Metrics
from fivefold.algorithms.losses.covariance import CHOSEN, CovarianceChoice
from fivefold.algorithms.losses.ppo import PPO
from fivefold.algorithms.losses.surrogate import PolicyTokens


@dataclass(frozen=True)
class ClipCov:
    """Clip-Cov (Cui et al. 2025, arXiv 2505.22617).

    A token costs what it costs in PPO; of the tokens whose covariance is in [`clip_cov_lb`, `clip_cov_ub`], as many as
    `clip_cov_ratio` of all are drawn at random, and cost 0. `CovarianceChoice` says what the covariance is.
    """

    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    clip_cov_ratio: Annotated[float, Field(gt=0, le=1)] = 2e-4
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0

    @property
    def before(self) -> CovarianceChoice:
        """What chooses the tokens of a mini-batch."""
        return CovarianceChoice(self.clip_cov_ratio, self.clip_cov_lb, self.clip_cov_ub, at_random=True)

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Metrics]:
        cost_T, metrics = PPO(self.eps_clip, self.eps_clip_higher)(tokens)
        chosen_T = tokens.fields[CHOSEN].bool()
        return torch.where(chosen_T, torch.zeros_like(cost_T), cost_T), {
            **metrics,
            "covariance_chosen": chosen_T.to(cost_T.dtype).sum(),
        }
