"""What a policy loss is: the log-probs and advantages of whole sequences in, the cost of each token out.

    loss = aggregate(correction * surrogate - entropy_coeff * entropy + kl_coeff * KL)

The files beside this one have the surrogates. `fivefold/algorithms/policy_loss.py` does the rest for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from fivefold.algorithms.kl import bounded_exp
from fivefold.algorithms.loss import Metrics, count
from fivefold.algorithms.ragged import Sequences


@dataclass(frozen=True)
class PolicyTokens:
    """T tokens of whole sequences. All values are 0 on tokens that are not trained."""

    logprobs_T: torch.Tensor
    """log p of each token under the current weights, with gradient."""
    old_logprobs_T: torch.Tensor
    """log p_old of each token, under the weights at the beginning of the step."""
    advantages_T: torch.Tensor
    sequences: Sequences
    fields: Mapping[str, torch.Tensor]
    """All fields of the batch, by name; on tokens that are not trained they may be NaN."""

    @property
    def trained_T(self) -> torch.Tensor:
        """bool [T]: whether each token is trained."""
        return self.sequences.mask_T.bool()

    @property
    def log_ratio_T(self) -> torch.Tensor:
        """log p - log p_old, with gradient."""
        return self.logprobs_T - self.old_logprobs_T

    @property
    def ratio_T(self) -> torch.Tensor:
        """p / p_old, with gradient; bounded, so that sums stay finite."""
        return bounded_exp(self.log_ratio_T)


class Surrogate(Protocol):
    """A policy loss. It travels to the workers, so it is a frozen dataclass of a module.

    A loss that needs something of a whole mini-batch, which no micro-batch shows, has an attribute `before`, a
    `BatchStep` (fivefold/algorithms/batch_steps.py) that adds fields to the batch.
    """

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Metrics]:
        """Return the cost of each token [T], with gradient, and sums of metrics over the trained tokens, without.

        The costs of a sequence depend on no other sequence. Costs of tokens that are not trained are ignored, but must
        be finite.
        """


def clip_metrics(ratio_T: torch.Tensor, tokens: PolicyTokens, low: float, high: float) -> Metrics:
    """Count the tokens that have no gradient, because their ratio is beyond [1 - low, 1 + high] on the far side."""
    ratio_T, advantages_T = ratio_T.detach(), tokens.advantages_T
    lower_T = (ratio_T < 1.0 - low) & (advantages_T < 0)
    upper_T = (ratio_T > 1.0 + high) & (advantages_T > 0)
    return {
        "clip_fraction": count(lower_T | upper_T, ratio_T),
        "clip_fraction_lower": count(lower_T, ratio_T),
        "clip_fraction_upper": count(upper_T, ratio_T),
    }
