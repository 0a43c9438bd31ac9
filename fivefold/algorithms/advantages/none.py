"""No advantage: rewards are measured, and not trained on."""

from __future__ import annotations

import torch

from fivefold.algorithms.advantages.scores import Scores


def none(scores: Scores) -> torch.Tensor:
    """Return A_i = 0, so that only the other terms of the loss train: a teacher's, the entropy's, the KL penalty."""
    return torch.zeros_like(scores.rewards_N)
