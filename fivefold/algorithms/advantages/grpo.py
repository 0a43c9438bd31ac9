"""GRPO's advantages, and all others that normalise over the group or the batch."""

from __future__ import annotations

import torch

from fivefold.algorithms.advantages.scores import Scores
from fivefold.config.schema.roles import NormConfig


def grpo(scores: Scores, reward_norm: NormConfig) -> torch.Tensor:
    """Compute A = (R - mean) / (std + eps), where `reward_norm` names the sets that mean and std are taken over.

        mean    std
        group   group    GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2)
        group   none     Dr. GRPO (Liu et al. 2025, arXiv 2503.20783)
        group   batch    LitePPO (Liu et al. 2025, arXiv 2508.08221)
        batch   batch    batch normalisation

    The standard deviation is the sample's (divided by n - 1). If all values of such a set are equal, they become
    exactly 0: the set holds no signal, and a division by eps would turn rounding errors into noise.
    """
    sets = {"group": scores.of_group, "batch": scores.of_batch}
    result_N = scores.rewards_N
    is_constant_N = torch.zeros_like(scores.groups_N, dtype=torch.bool)
    if reward_norm.mean_level != "none":
        result_N = result_N - sets[reward_norm.mean_level].mean_N
        is_constant_N |= sets[reward_norm.mean_level].is_constant_N
    if reward_norm.std_level != "none":
        result_N = result_N / (sets[reward_norm.std_level].std_N + reward_norm.eps)
        is_constant_N |= sets[reward_norm.std_level].is_constant_N
    return torch.where(is_constant_N, torch.zeros_like(result_N), result_N)
