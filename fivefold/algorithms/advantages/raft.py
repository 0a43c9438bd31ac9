"""RAFT: right completions are trained on, and no others."""

from __future__ import annotations

import torch

from fivefold.algorithms.advantages.scores import Scores


def raft(scores: Scores, full_reward: float = 1.0) -> torch.Tensor:
    """Return A = 1 where R >= `full_reward`, else 0.

    Reward-ranked fine-tuning (Dong et al. 2023, arXiv 2304.06767) on verifiable rewards: with `loss=reinforce` the
    likelihood of right completions is maximised, with `loss=ppo` this is RAFT++ (Xiong et al. 2025, arXiv 2504.11343).
    """
    return (scores.rewards_N >= full_reward).to(scores.rewards_N.dtype)
