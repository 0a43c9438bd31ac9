"""How the costs of tokens become one number.

Over the sequences s of a mini-batch that have trained tokens t, N sequences in all:

    token_mean           sum_s sum_t cost / number of trained tokens     DAPO (Yu et al. 2025, eq. 8)
    sequence_mean        1/N sum_s (mean_t cost)                         GRPO (Shao et al. 2024, eq. 3)
    sequence_sum         1/N sum_s sum_t cost                            REINFORCE over whole responses
    sequence_sum_fixed   1/N sum_s sum_t cost / length                   Dr. GRPO's code (Liu et al. 2025)

With the last, each token has the same weight, as with the third, and the loss stays of the size of one token's.
"""

from __future__ import annotations

from typing import Literal

import torch

from fivefold.algorithms.ragged import Sequences
from fivefold.types import Totals

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "sequence_sum_fixed"]


def token_weights(mask_T: torch.Tensor, lengths: tuple[int, ...], aggregation: Aggregation) -> torch.Tensor:
    """Return the factor of each token's cost in the sum: the mask, with `sequence_mean` divided by its sequence's sum.

    Args:
        mask_T: [T], 1 on trained tokens, else 0.
        lengths: tokens of each sequence; they sum to T.
        aggregation: as above.

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
        aggregation: as above.
        length: tokens by which `sequence_sum_fixed` divides.
    """
    if aggregation == "token_mean":
        return float(max(1, totals.n_trained_tokens))
    return float(max(1, totals.n_trained_sequences) * (length if aggregation == "sequence_sum_fixed" else 1))
