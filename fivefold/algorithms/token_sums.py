"""Sums over the tokens of a micro-batch, and the weights and divisors that make means of them."""

from __future__ import annotations

import torch

from fivefold.algorithms.loss import Aggregation, Sums
from fivefold.algorithms.metrics import Metric, Metrics
from fivefold.algorithms.sequences import Sequences
from fivefold.batch import Totals


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
        aggregation: as at the top of `fivefold/algorithms/loss.py`.

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
        aggregation: as at the top of `fivefold/algorithms/loss.py`.
        length: tokens by which `sequence_sum_fixed` divides.
    """
    if aggregation == "token_mean":
        return float(max(1, totals.n_trained_tokens))
    return float(max(1, totals.n_trained_sequences) * (length if aggregation == "sequence_sum_fixed" else 1))
