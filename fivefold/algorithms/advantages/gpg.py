"""GPG: groups without signal do not make the gradient of the others smaller."""

from __future__ import annotations

import torch

from fivefold.algorithms.advantages.scores import Scores


def gpg(scores: Scores) -> torch.Tensor:
    """Compute A = N / (N - M) * (R - mean over the group), where M of the N completions are in groups of equal rewards.

    Group policy gradient (Chu et al. 2025, arXiv 2504.02546), without a division by the standard deviation.
    """
    group = scores.of_group
    n_with_signal = (~group.is_constant_N).sum().clamp(min=1)
    return group.zero_if_constant(scores.rewards_N - group.mean_N) * len(scores.rewards_N) / n_with_signal
