"""The optimal token baseline: at each token, the mean reward of the group, weighted by how far each path has varied.

For token t of completion i, of n with trained tokens at t,

    w_it = 1 - 2 p_it + sum_v p_v^2        the squared norm of the gradient of log p_it by the logits
    W_it = w_i1 + ... + w_it
    A_it = R_i - sum_j W_jt R_j / sum_j W_jt

Of all baselines that depend on t alone it has the least variance, if gradients of logits stand for gradients of weights
(verl's `optimal_token_baseline`). Tokens are counted among the trained ones of their completion, whatever lies between
them (`tir_optimal_token_baseline`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from fivefold.algorithms.advantages.compute import Scores

Energies = Sequence[npt.NDArray[np.float64]]
"""w of each trained token of each completion."""


def optimal_token_baseline(scores: Scores, zero_tail: bool = True) -> torch.Tensor:
    """Return the rewards, which `token_advantages` turns into advantages.

    Args:
        scores: the completions.
        zero_tail: the option of `token_advantages`, which this function does not read.
    """
    return scores.rewards_N


def token_advantages(
    rewards_N: npt.NDArray[np.float64], groups: Sequence[int], energies: Energies, zero_tail: bool = True
) -> list[npt.NDArray[np.float64]]:
    """Return the advantage of each trained token of each completion.

    Args:
        rewards_N: reward of each completion.
        groups: the group of each.
        energies: w of each one's trained tokens.
        zero_tail: whether the longest completion of a group has no baseline after the end of the second longest;
            otherwise its baseline is its own reward there, and its advantage 0.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        members[group].append(index)
    advantages: list[npt.NDArray[np.float64]] = [np.empty(0)] * len(groups)
    for own in members.values():
        lengths = [len(energies[index]) for index in own]
        paths_ML = np.zeros((len(own), max(lengths)))
        for row, index in enumerate(own):
            paths_ML[row, : lengths[row]] = np.cumsum(energies[index])
        total_L = paths_ML.sum(0)
        weighted_L = (paths_ML * rewards_N[own, None]).sum(0)
        baseline_L = np.divide(weighted_L, total_L, out=np.zeros_like(total_L), where=total_L > 0)
        if zero_tail or len(own) == 1:
            baseline_L[sorted([0, *lengths])[-2] :] = 0.0
        for row, index in enumerate(own):
            advantages[index] = rewards_N[index] - baseline_L[: lengths[row]]
    return advantages
