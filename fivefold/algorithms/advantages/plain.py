"""Advantages that compare a completion with no other."""

from __future__ import annotations

import torch

from fivefold.algorithms.advantages.compute import Scores


def rewards(scores: Scores) -> torch.Tensor:
    """Return A = R, from which the tokens' advantages follow later.

    GAE combines R with a critic's values (`fivefold/algorithms/gae.py`). In REINFORCE++ (Hu 2025, arXiv 2501.03262)
    token t has R - kl_ctl * sum_{s >= t} KL_s, brought to mean 0 and standard deviation 1 over all trained tokens of
    the step: `actor.kl_in: reward` subtracts the penalty, and `actor.whiten_advantages` normalises.
    """
    return scores.rewards_N


def raft(scores: Scores, full_reward: float = 1.0) -> torch.Tensor:
    """Return A = 1 where R >= `full_reward`, else 0.

    Reward-ranked fine-tuning (Dong et al. 2023, arXiv 2304.06767) on verifiable rewards: with `loss=reinforce` the
    likelihood of right completions is maximised, with `loss=ppo` this is RAFT++ (Xiong et al. 2025, arXiv 2504.11343).
    """
    return (scores.rewards_N >= full_reward).to(scores.rewards_N.dtype)


def none(scores: Scores) -> torch.Tensor:
    """Return A = 0, so that only the other terms of the loss train: a teacher's, the entropy's, the KL penalty."""
    return torch.zeros_like(scores.rewards_N)
