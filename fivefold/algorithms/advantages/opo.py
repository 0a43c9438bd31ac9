"""OPO: the baseline of least variance."""

from __future__ import annotations

import torch

from fivefold.algorithms.advantages.scores import Scores


def opo(scores: Scores) -> torch.Tensor:
    """Compute A_i = R_i - sum_j l_j R_j / sum_j l_j over the group, with lengths l in tokens.

    On-policy RL with optimal reward baseline (Hao et al. 2025, arXiv 2505.23585): the baseline has the least variance
    if the squared norm of a completion's gradient is in proportion to its length.
    """
    group = scores.of_group
    # A completion without tokens has no gradient; a group of such is constant in all that matters.
    weights_N = scores.lengths_N.to(scores.rewards_N.dtype)
    baseline_N = group.sum(weights_N * scores.rewards_N) / group.sum(weights_N).clamp(min=1.0)
    return group.zero_if_constant(scores.rewards_N - baseline_N)
