"""Advantages for the best of k completions instead of the mean one."""

from __future__ import annotations

from math import comb, sqrt

import torch

from fivefold.algorithms.advantages.compute import Scores

EPS = 1e-6
"""Added to a standard deviation."""


def pass_at_k(scores: Scores, k: int = 4, full_reward: float = 1.0) -> torch.Tensor:
    """Compute the expected advantage over all subsets of k completions of the group, whose reward is their best one's.

    Pass@k training (Chen et al. 2025, arXiv 2508.10751). Of n completions, m are wrong: their reward is below
    `full_reward`. With the share P = 1 - C(m, k) / C(n, k) of subsets with a right one, and S = sqrt(P (1 - P)),

        right    A = (1 - P) / S
        wrong    A = (1 - P - C(m - 1, k - 1) / C(n - 1, k - 1)) / S

    and 0 where all subsets, or none, have a right one.

    Raises:
        ValueError: a group of k completions or fewer: one subset has no deviation from the mean.
    """
    result_N = torch.zeros_like(scores.rewards_N)
    right_N = scores.rewards_N >= full_reward
    for group in range(int(scores.groups_N.max()) + 1):
        members_N = scores.groups_N == group
        n, m = int(members_N.sum()), int((members_N & ~right_N).sum())
        if not 1 <= k < n:
            raise ValueError(
                f"k={k} completions are drawn from a group of {n}, and only several subsets can differ: set "
                f"advantage_kwargs.k between 1 and {n - 1}, or raise gconfig.n_samples above {k}"
            )
        share = 1.0 - comb(m, k) / comb(n, k)
        if 0.0 < share < 1.0:
            deviation = sqrt(share * (1.0 - share))
            result_N[members_N & right_N] = (1.0 - share) / deviation
            result_N[members_N & ~right_N] = (1.0 - share - comb(m - 1, k - 1) / comb(n - 1, k - 1)) / deviation
    return result_N


def pass_at_k_best(scores: Scores, divide_by_std: bool = False) -> torch.Tensor:
    """Give the best completion of each group its distance from the second best, and 0 to all others.

    Tang et al. 2025 (arXiv 2503.19595). If several are the best, the distance is 0.

    Args:
        scores: the completions.
        divide_by_std: whether the distance is divided by the standard deviation of the group's rewards, as in verl.
    """
    result_N, std_N = torch.zeros_like(scores.rewards_N), scores.of_group.std_N
    for group in range(int(scores.groups_N.max()) + 1):
        (members_M,) = torch.nonzero(scores.groups_N == group, as_tuple=True)
        if len(members_M) > 1:
            best, second = scores.rewards_N[members_M].topk(2).values
            result_N[members_M[scores.rewards_N[members_M].argmax()]] = best - second
    return result_N / (std_N + EPS) if divide_by_std else result_N
