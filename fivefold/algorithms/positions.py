"""Where trained tokens stand in their sequences, for metrics by position, `entropy_quarter/<i>`."""

from __future__ import annotations

import torch

from fivefold.algorithms.loss import Metrics, count
from fivefold.algorithms.ragged import Sequences

N_PARTS = 4
"""Parts of equal length into which the trained tokens of a sequence are divided."""
PART, SHARE = "entropy_quarter", "entropy_quarter_share"
"""Names of the metrics: the sum of entropies in a part, and the number of its tokens."""


def parts(sequences: Sequences) -> torch.Tensor:
    """Return int64 [T]: floor(4 i / n) for trained token i of n of its sequence, counted from 0; else any part."""
    counts_S = sequences.counts_S
    before_S = counts_S.cumsum(0) - counts_S
    place_T = sequences.mask_T.cumsum(0) - 1 - sequences.spread(before_S)
    part_T = (N_PARTS * place_T / sequences.spread(counts_S).clamp(min=1)).floor()
    return part_T.clamp(0, N_PARTS - 1).long()


def entropy_by_part(entropy_T: torch.Tensor, sequences: Sequences) -> Metrics:
    """Return the sum of the entropies of each part's trained tokens, and the number of these tokens."""
    part_T, trained_T = parts(sequences), sequences.mask_T.bool()
    metrics: Metrics = {}
    for number in range(N_PARTS):
        is_in_T = trained_T & (part_T == number)
        metrics[f"{PART}/{number + 1}"] = torch.where(is_in_T, entropy_T, torch.zeros_like(entropy_T)).sum()
        metrics[f"{SHARE}/{number + 1}"] = count(is_in_T, entropy_T)
    return metrics
