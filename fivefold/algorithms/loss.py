"""What an engine minimises: per-token tensors of one micro-batch in, a *sum* and metrics out.

The engine alone divides by `Loss.normalizer` of the whole mini-batch. A sequence's share of the loss never depends
on its neighbours, so the gradient is the same however the mini-batch is split, packed and laid out:

    sum over micro-batches of loss(micro-batch) / normalizer(mini-batch)  ==  loss(mini-batch) / normalizer(mini-batch)

The costs of tokens become one number by an aggregation. Over the sequences s of a mini-batch that have trained tokens
t, N sequences in all:

    token_mean           sum_s sum_t cost / number of trained tokens     DAPO (Yu et al. 2025, eq. 8)
    sequence_mean        1/N sum_s (mean_t cost)                         GRPO (Shao et al. 2024, eq. 3)
    sequence_sum         1/N sum_s sum_t cost                            REINFORCE over whole responses
    sequence_sum_fixed   1/N sum_s sum_t cost / length                   Dr. GRPO's code (Liu et al. 2025)

The last one weights all tokens alike, as `sequence_sum` does, and keeps the loss at the size of one token's cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from fivefold.algorithms.batch_steps import BatchStep
from fivefold.algorithms.distillation import Distillation
from fivefold.algorithms.metrics import Metric, Metrics
from fivefold.algorithms.sequences import PolicyTokens
from fivefold.batch import Totals

Sums = Mapping[str, torch.Tensor | Metric]
"""Sums over the trained tokens by name, which become means over them; a `Metric` says itself what becomes of it."""

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "sequence_sum_fixed"]


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch of whole sequences, laid end to end; it may be empty (T = 0)."""

    predictions: Mapping[str, torch.Tensor]
    """float32 [T] each, by name: the predictions of the model's head under the current weights.

    A policy's head gives `logprobs`, log p(token) at the loss's temperature, with gradient; and `entropy` of the
    distribution that predicts the token, with gradient if the loss asks for it.
    """
    mask_T: torch.Tensor
    """float32 [T]: 1 on trained tokens, else 0. All other values of a token whose mask is 0 are ignored, even NaN."""
    lengths: tuple[int, ...]
    """Tokens of each sequence; they sum to T."""
    fields: Mapping[str, torch.Tensor]
    """[T, ...] each, by name: the batch's per-token fields."""


class Loss(Protocol):
    """What an engine minimises."""

    @property
    def temperature(self) -> float:
        """Temperature that divides the logits."""

    @property
    def entropy_gradient(self) -> bool:
        """Whether the entropy must carry a gradient."""

    @property
    def divergence(self) -> Distillation | None:
        """How the divergence from teachers' distributions is taken that it needs; None: it needs none."""

    @property
    def before(self) -> BatchStep | None:
        """What is computed over the whole mini-batch first, because no micro-batch shows it; None: nothing."""

    def normalizer(self, totals: Totals) -> float:
        """Return the divisor, at least 1, of the sum over a whole mini-batch of these sizes."""

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """Return the loss's sum (scalar, with gradient) and the metrics of this micro-batch (without)."""


class Surrogate(Protocol):
    """A policy loss. It travels to the workers, so it is a frozen dataclass of a module.

    A loss that needs something of a whole mini-batch, which no micro-batch shows, has an attribute `before`, a
    `BatchStep` (fivefold/algorithms/batch_steps.py) that adds fields to the batch.
    """

    def __call__(self, tokens: PolicyTokens) -> tuple[torch.Tensor, Sums]:
        """Return the cost of each token [T], with gradient, and sums of metrics over the trained tokens, without.

        The costs of a sequence depend on no other sequence. Costs of tokens that are not trained are ignored, but must
        be finite.
        """
