"""TOPR: bad responses are weighted by how likely the policy still is to give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from fivefold.algorithms.kl import bounded_exp
from fivefold.algorithms.loss import Metrics
from fivefold.algorithms.losses.surrogate import PolicyTokens


@dataclass(frozen=True)
class TOPR:
    """Tapered off-policy REINFORCE (Le Roux et al. 2025, arXiv 2503.14286).

    A token costs -w A log p. Where A > 0, w is `positive_weight`; elsewhere it is `negative_weight` times the ratio of
    the whole sequence, truncated to [0, 1]:

        w = negative_weight * sg(min(1, exp(sum_t (log p_t - log p_old,t))))
    """

    positive_weight: Annotated[float, Field(ge=0)] = 1.0
    negative_weight: Annotated[float, Field(ge=0)] = 1.0

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Metrics]:
        taper_S = bounded_exp(tokens.sequences.sum(tokens.log_ratio_T.detach()).clamp(max=0.0))
        taper_T = tokens.sequences.spread(taper_S)
        positive_T = torch.full_like(taper_T, self.positive_weight)
        weight_T = torch.where(tokens.advantages_T > 0, positive_T, self.negative_weight * taper_T)
        return -weight_T * tokens.advantages_T * tokens.logprobs_T, {}
