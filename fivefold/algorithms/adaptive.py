"""Weights of loss terms that follow a target from step to step."""

from __future__ import annotations

STEEPEST = 0.2
"""Largest relative distance from its target that a step's KL divergence counts with."""


def adapted_kl(kl_ctl: float, kl: float, target: float, share: float) -> float:
    """Return the weight of a KL penalty after a step (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

        kl_ctl <- kl_ctl * (1 + clip(kl / target - 1, -0.2, 0.2) * share)

    Args:
        kl_ctl: the weight in the step.
        kl: the divergence that the step measured, in nats per token.
        target: the divergence that is wanted.
        share: samples of the step as a share of the horizon.
    """
    error = min(max(kl / target - 1.0, -STEEPEST), STEEPEST)
    # A step of more samples than the horizon has must not turn the weight negative.
    return kl_ctl * (1.0 + error * min(share, 1.0))


def adapted_entropy(coeff: float, step: float, *, is_low: bool) -> float:
    """Return the weight of the entropy after a step (Skywork-OR1: He et al. 2025, arXiv 2505.22312, section 3.2.4).

        coeff <- max(0, coeff + step) if the entropy is at most the target, else max(0, coeff - step)

    Args:
        coeff: the weight in the step.
        step: its change.
        is_low: whether the step's entropy is at most the target.
    """
    return max(0.0, coeff + (step if is_low else -step))
