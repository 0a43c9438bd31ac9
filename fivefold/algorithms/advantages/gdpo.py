"""GDPO: each of several rewards is normalised by itself before they are added up."""

from __future__ import annotations

import torch

from fivefold.algorithms.advantages.scores import Scores, Sets
from fivefold.config.schema.roles import NormConfig


def gdpo(scores: Scores, reward_norm: NormConfig) -> torch.Tensor:
    """Compute A = S / (std + eps) over the batch, whose mean of S is 0. S sums the normalised rewards of a completion:

        S = sum_k w_k (R_k - mean_k) / (std_k + eps)        mean_k and std_k over the group

    Group reward-decoupled normalisation (Liu et al. 2026, arXiv 2601.05242, section 3.1): completions with the same sum
    of other rewards keep advantages of their own. A completion has those rewards that are for its prompt.
    """
    total_N = torch.zeros_like(scores.rewards_N)
    for values_N, weight in zip(scores.parts_NK.unbind(1), scores.weights_K.tolist(), strict=True):
        given_N = ~values_N.isnan()
        if given_N.any():
            values_M = values_N[given_N]
            group = Sets(values_M, scores.groups_N[given_N])
            normal_M = group.zero_if_constant((values_M - group.mean_N) / (group.std_N + reward_norm.eps))
            total_N[given_N] += weight * normal_M
    # The mean is not subtracted: it is a rounding error, which groups without a signal would have as their advantage.
    return total_N / (Sets(total_N, torch.zeros_like(scores.groups_N)).std_N + reward_norm.eps)
