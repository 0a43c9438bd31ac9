"""RLOO: each completion is compared with the others of its group."""

from __future__ import annotations

import torch

from fivefold.algorithms.advantages.scores import Scores


def rloo(scores: Scores) -> torch.Tensor:
    """Compute A_i = R_i - 1/(n - 1) sum_{j != i} R_j over the group's n completions.

    REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al. 2024, arXiv 2402.14740). It equals n/(n - 1) times the
    difference from the group's mean. A completion that is alone in its group has 0.
    """
    group = scores.of_group
    return group.zero_if_constant((scores.rewards_N - group.mean_N) * group.count_N / (group.count_N - 1).clamp(min=1))
