"""PF-PPO: how often policy filtration draws each sample (Shen and Zhang 2024, arXiv 2409.06957)."""

from __future__ import annotations

import torch

from fivefold.config.schema.roles import Filtration

LEAST = 1e-8
"""Added to every weight, so that samples which all have the weight 0 are drawn alike."""
OF_BEST, OF_OTHERS = 0.4, 0.1
"""Weights of samples with the largest reward and of all others, with `max_random`."""


def filtration_weights(rewards_N: torch.Tensor, rule: Filtration, power: float) -> torch.Tensor:
    """Return float64 [N], in proportion to how often each of N samples of a step is drawn.

        power        w = abs(R)^power
        max_min      w = 1 where R is the largest or the smallest of the step, else 0
        max_random   w = 0.4 where R is the largest of the step, else 0.1

    The paper filters the samples whose rewards a reward model tells least reliably, those in the middle. These rules
    over a whole step are verl's, which draws N samples with replacement. Here each sample is trained on once, with the
    weight of its expected number of draws, N w / sum of w: the mean gradient is the same, without the noise of drawing.
    """
    match rule:
        case "power":
            weights_N = rewards_N.abs() ** power
        case "max_min":
            weights_N = ((rewards_N == rewards_N.max()) | (rewards_N == rewards_N.min())).double()
        case "max_random":
            weights_N = torch.where(rewards_N == rewards_N.max(), OF_BEST, OF_OTHERS).double()
    return weights_N + LEAST
