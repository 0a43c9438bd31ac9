"""Kimi k1.5's loss: a squared penalty in place of the clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from fivefold.algorithms.loss import Metrics
from fivefold.algorithms.losses.surrogate import PolicyTokens


@dataclass(frozen=True)
class Kimi:
    """Online policy mirror descent (Kimi team 2025, arXiv 2501.12599, section 2.3.2).

    A sequence costs -A log p(sequence) + tau/2 (log p(sequence) - log p_old(sequence))^2, with A the reward minus the
    group's mean. Both terms are written over its tokens: token t costs -A log p_t + tau/2 D d_t, where d_t is its
    log-ratio and D = sum_t d_t.
    """

    tau: Annotated[float, Field(ge=0)] = 0.1

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Metrics]:
        log_ratio_T = tokens.log_ratio_T
        whole_T = tokens.sequences.spread(tokens.sequences.sum(log_ratio_T))
        return -tokens.advantages_T * tokens.logprobs_T + 0.5 * self.tau * whole_T * log_ratio_T, {}
