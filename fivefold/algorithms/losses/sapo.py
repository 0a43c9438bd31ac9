"""SAPO: a sigmoid in place of the clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from fivefold.algorithms.loss import Metrics
from fivefold.algorithms.losses.surrogate import PolicyTokens


@dataclass(frozen=True)
class SAPO:
    """Soft adaptive policy optimisation (Gao et al. 2025, arXiv 2511.20347).

    A token costs -A f(r) with the soft gate

        f(r) = 4/tau * sigmoid(tau (r - 1))      tau = tau_pos where A > 0, tau_neg elsewhere

    whose slope is 1 at r = 1 and falls smoothly on both sides.
    """

    tau_pos: Annotated[float, Field(gt=0)] = 1.0
    tau_neg: Annotated[float, Field(gt=0)] = 1.05

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Metrics]:
        advantages_T, ratio_T = tokens.advantages_T, tokens.ratio_T
        tau_T = torch.where(
            advantages_T > 0, torch.full_like(ratio_T, self.tau_pos), torch.full_like(ratio_T, self.tau_neg)
        )
        return -advantages_T * (4.0 / tau_T) * torch.sigmoid(tau_T * (ratio_T - 1.0)), {}
