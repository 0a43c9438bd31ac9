"""KL-Cov: a few tokens of the largest covariance are held near the old policy, so that the entropy stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from fivefold.algorithms.loss import Metrics
from fivefold.algorithms.losses.covariance import CHOSEN, CovarianceChoice
from fivefold.algorithms.losses.surrogate import PolicyTokens


@dataclass(frozen=True)
class KLCov:
    """KL-Cov (Cui et al. 2025, arXiv 2505.22617).

    A token costs -A r, without a clip; of all tokens, the `kl_cov_ratio` with the largest covariance, if it is above 0,
    cost `ppo_kl_coef` * |log p - log p_old| more. `CovarianceChoice` says what the covariance is.
    """

    kl_cov_ratio: Annotated[float, Field(gt=0, le=1)] = 2e-4
    ppo_kl_coef: Annotated[float, Field(ge=0)] = 1.0

    @property
    def before(self) -> CovarianceChoice:
        """What chooses the tokens of a mini-batch."""
        return CovarianceChoice(self.kl_cov_ratio)

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Metrics]:
        chosen_T = tokens.fields[CHOSEN].to(tokens.logprobs_T.dtype)
        cost_T = -tokens.advantages_T * tokens.ratio_T + self.ppo_kl_coef * chosen_T * tokens.log_ratio_T.abs()
        return cost_T, {"covariance_chosen": chosen_T.sum()}
