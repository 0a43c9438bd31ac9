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
from fivefold.algorithms.sequences import PolicyTokens, Sequences
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


def means(sums: Sums, over_T: torch.Tensor) -> Metrics:
    """Return metrics that are means over the tokens `over_T`, bool [T]; `sums` has their sums."""
    n = over_T.sum()
    return {name: each if isinstance(each, Metric) else Metric(each, n) for name, each in sums.items()}


def zero_unless(trained_T: torch.Tensor, values_T: torch.Tensor) -> torch.Tensor:
    """Return the values with 0 on tokens that are not trained, whose values may be infinite or NaN."""
    # A product with the mask would not do: 0 * NaN is NaN, in the sum and in the gradient.
    return torch.where(trained_T, values_T, torch.zeros_like(values_T))


def count(where_T: torch.Tensor, like_T: torch.Tensor) -> torch.Tensor:
    """Return the number of true tokens, as a metric in the dtype of `like_T`."""
    return where_T.to(like_T.dtype).sum()


def largest(values_T: torch.Tensor, over_T: torch.Tensor) -> Metric:
    """Return the largest value of the tokens `over_T`, bool [T]; it is -inf, with the weight 0, if there is none."""
    # Indexing with the mask would wait for the device, which alone knows the number of these tokens.
    lowest = values_T.new_full((1,), -torch.inf)
    return Metric(torch.cat([torch.where(over_T, values_T, lowest), lowest]).amax(), over_T.sum(), "max")


def token_weights(mask_T: torch.Tensor, lengths: tuple[int, ...], aggregation: Aggregation) -> torch.Tensor:
    """Return the factor of each token's cost in the sum: the mask, with `sequence_mean` divided by its sequence's sum.

    Args:
        mask_T: [T], 1 on trained tokens, else 0.
        lengths: tokens of each sequence; they sum to T.
        aggregation: as at the top of this file.

    Returns:
        [T], in the mask's dtype.
    """
    if aggregation != "sequence_mean":
        return mask_T
    sequences = Sequences.of(mask_T, lengths)
    return mask_T / sequences.spread(sequences.counts_S.clamp(min=1))


def divisor(totals: Totals, aggregation: Aggregation, length: int = 1) -> float:
    """Return what the sum over a whole mini-batch of these sizes is divided by, at least 1.

    Args:
        totals: sizes of the mini-batch.
        aggregation: as at the top of this file.
        length: tokens by which `sequence_sum_fixed` divides.
    """
    if aggregation == "token_mean":
        return float(max(1, totals.n_trained_tokens))
    return float(max(1, totals.n_trained_sequences) * (length if aggregation == "sequence_sum_fixed" else 1))
