"""REINFORCE: the plain policy gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fivefold.algorithms.loss import Metrics
from fivefold.algorithms.losses.surrogate import PolicyTokens


@dataclass(frozen=True)
class Reinforce:
    """The policy gradient without ratios (Williams 1992, https://doi.org/10.1007/BF00992696).

    A token costs -A log p. RLOO, ReMax, OPO and GPG are this loss with advantages of their own. It is exact if each
    step has one update; further ones would train on the samples of an older policy as if they were the policy's own.
    """

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Metrics]:
        return -tokens.advantages_T * tokens.logprobs_T, {}
