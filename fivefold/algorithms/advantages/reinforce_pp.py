"""REINFORCE++ and its form with a baseline."""

from __future__ import annotations

import torch

from fivefold.algorithms.advantages.scores import Scores


def reinforce_pp(scores: Scores) -> torch.Tensor:
    """Return A = R.

    In REINFORCE++ (Hu 2025, arXiv 2501.03262) token t has R - kl_ctl * sum_{s >= t} KL_s, brought to mean 0 and
    standard deviation 1 over all trained tokens of the step. With `actor.kl_in: reward` the penalty, and with
    `actor.whiten_advantages` the normalisation follow, where the tokens are.
    """
    return scores.rewards_N


def reinforce_pp_baseline(scores: Scores) -> torch.Tensor:
    """Return A = R - mean over the group, to be brought to standard deviation 1 by `actor.whiten_advantages`.

    REINFORCE++-baseline (Hu 2025, arXiv 2501.03262).
    """
    return scores.of_group.zero_if_constant(scores.rewards_N - scores.of_group.mean_N)
