"""AsymRE: a baseline below the mean, so that good completions count more than bad ones."""

from __future__ import annotations

import torch

from fivefold.algorithms.advantages.scores import Scores


def asymre(scores: Scores, baseline_shift: float = -0.1) -> torch.Tensor:
    """Compute A = R - (mean over the group + baseline_shift).

    Asymmetric REINFORCE (Arnal et al. 2025, arXiv 2506.20520), for samples of older policies. With a shift that is not
    0, a group of equal rewards is trained on too.
    """
    return scores.of_group.zero_if_constant(scores.rewards_N - scores.of_group.mean_N) - baseline_shift
