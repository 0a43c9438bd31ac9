"""Rewards normalised over the group of their prompt or over the batch: GRPO, Dr. GRPO, LitePPO and GDPO."""

from __future__ import annotations

import torch

from fivefold.algorithms.advantages.scores import Scores, Sets
from fivefold.config.schema.roles import NormConfig


def grpo(scores: Scores, reward_norm: NormConfig) -> torch.Tensor:
    """Compute A = (R - mean) / (std + eps), where `reward_norm` names the sets that mean and std are taken over.

        mean    std
        group   group    GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2)
        group   none     Dr. GRPO (Liu et al. 2025, arXiv 2503.20783)
        group   batch    LitePPO (Liu et al. 2025, arXiv 2508.08221)
        batch   batch    batch normalisation

    The standard deviation is the sample's (divided by n - 1). If all values of such a set are equal, they become
    exactly 0: the set carries no signal, and dividing by eps would turn rounding errors into noise.
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


def gdpo(scores: Scores, reward_norm: NormConfig) -> torch.Tensor:
    """Compute A = S / (std + eps) over the batch, where S, the sum of normalised rewards of a completion, has mean 0:

        S = sum_k w_k (R_k - mean_k) / (std_k + eps)        mean_k and std_k over the group

    Group reward-decoupled normalisation (Liu et al. 2026, arXiv 2601.05242, section 3.1): completions whose rewards
    differ but add up to the same sum keep different advantages. A completion has the rewards that are for its prompt.
    """
    total_N = torch.zeros_like(scores.rewards_N)
    for values_N, weight in zip(scores.parts_NK.unbind(1), scores.weights_K.tolist(), strict=True):
        given_N = ~values_N.isnan()
        if given_N.any():
            values_M = values_N[given_N]
            group = Sets(values_M, scores.groups_N[given_N])
            normal_M = group.zero_if_constant((values_M - group.mean_N) / (group.std_N + reward_norm.eps))
            total_N[given_N] += weight * normal_M
    # The mean is not subtracted: it is a rounding error, which would become the advantage of groups without a signal.
    return total_N / (Sets(total_N, torch.zeros_like(scores.groups_N)).std_N + reward_norm.eps)
