"""ReMax: each completion is compared with the greedy one."""

from __future__ import annotations

import torch

from fivefold.algorithms.advantages.scores import Scores


def remax(scores: Scores) -> torch.Tensor:
    """Compute A = R - R(greedy completion of the same prompt) (Li et al. 2023, arXiv 2310.10505, algorithm 1).

    Raises:
        ValueError: there are no greedy completions.
    """
    if scores.baselines_N is None:
        raise ValueError("ReMax compares with greedy completions, and none were generated")
    return scores.rewards_N - scores.baselines_N
