"""What an engine minimises: per-token tensors of one micro-batch in, a *sum* and sums of metrics out.

The engine alone divides by `Loss.normalizer` of the whole mini-batch. A sequence's share of the loss never depends
on the sequences beside it, so the gradient is the same however the mini-batch is split, packed and laid out:

    sum over micro-batches of loss(micro-batch) / normalizer(mini-batch)  ==  loss(mini-batch) / normalizer(mini-batch)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from fivefold.algorithms.batch_steps import BatchStep
from fivefold.types import Totals

Metrics = dict[str, torch.Tensor]


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
    def before(self) -> BatchStep | None:
        """What is computed over the whole mini-batch first, because no micro-batch shows it; None: nothing."""

    def normalizer(self, totals: Totals) -> float:
        """Return the divisor, at least 1, of the sum over a whole mini-batch of these sizes."""

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        """Return the loss's sum (scalar, with gradient) and the metrics' sums over trained tokens (without).

        Metrics are divided by the global number of trained tokens, except names that end in `/max` or `/min`:
        those are reduced by maximum or minimum (a micro-batch without trained tokens gives -inf or +inf).
        """


@dataclass(frozen=True)
class SFTLoss:
    """Negative log-likelihood of the trained tokens, averaged over the tokens of the mini-batch."""

    temperature: float = 1.0
    entropy_gradient: bool = False
    before: None = None

    def normalizer(self, totals: Totals) -> float:
        return float(max(1, totals.n_trained_tokens))

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        trained_T = inputs.mask_T.bool()
        nll = -zero_unless(trained_T, inputs.predictions["logprobs"]).sum()
        entropy = zero_unless(trained_T, inputs.predictions["entropy"].detach()).sum()
        return nll, {"nll": nll.detach(), "entropy": entropy}


def zero_unless(trained_T: torch.Tensor, values_T: torch.Tensor) -> torch.Tensor:
    """Return the values with 0 in place of those of tokens that are not trained, which may be infinite or NaN."""
    # A product with the mask would not do: 0 * NaN is NaN, in the sum and in the gradient.
    return torch.where(trained_T, values_T, torch.zeros_like(values_T))


def count(where_T: torch.Tensor, like_T: torch.Tensor) -> torch.Tensor:
    """Return the number of true tokens, as a metric in the dtype of `like_T`."""
    return where_T.to(like_T.dtype).sum()


def largest(values_T: torch.Tensor, trained_T: torch.Tensor) -> torch.Tensor:
    """Return the largest trained value; -inf, the identity of the maximum, if there is none."""
    # Indexing with the mask would wait for the device, which alone knows the number of trained tokens.
    lowest = values_T.new_full((1,), -torch.inf)
    return torch.cat([torch.where(trained_T, values_T, lowest), lowest]).amax()
