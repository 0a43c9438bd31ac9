"""Rewards normalised over the group of their prompt or over the batch: GRPO, Dr. GRPO, LitePPO and GDPO."""

from __future__ import annotations

import torch

from fivefold.algorithms.advantages.compute import Scores, Sets
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


def grpo_leave_one_out(scores: Scores, reward_norm: NormConfig) -> torch.Tensor:
    """Compute A_i = (R_i - mean) / (std + eps), with mean and standard deviation of the others of the group.

    GRPO with the baseline of REINFORCE leave-one-out, as in NeMo-RL. Where the others have equal rewards, R_i - mean is
    not divided. A completion that is alone in its group has 0.
    """
    group, count_N = scores.of_group, scores.of_group.count_N
    apart_N = (scores.rewards_N - group.mean_N) * count_N / (count_N - 1).clamp(min=1)
    # Deviations from the mean of all n sum to 0, so the others' sum to minus the completion's own.
    squares_N = (scores.rewards_N - group.mean_N).square()
    variance_N = (group.sum(squares_N) - squares_N * count_N / (count_N - 1).clamp(min=1)) / (count_N - 2).clamp(min=1)
    std_N = torch.where(group.others_constant_N, 0.0, variance_N.clamp(min=0).sqrt())
    return group.zero_if_constant(torch.where(std_N > 0, apart_N / (std_N + reward_norm.eps), apart_N))


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
