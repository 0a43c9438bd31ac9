"""What an algorithm carries from one training step to the next; checkpoints hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite

from fivefold.config.schema.roles import ActorConfig

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


@dataclass(frozen=True)
class AlgorithmState:
    """State of the algorithm after a step."""

    kl_ctl: float
    """Weight of the KL divergence from the reference."""
    corrects_rollout: bool = False
    """Whether `actor.rollout_correction.method: auto` has begun to correct."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    entropy_is_low: bool = True
    """Whether the entropy of the step was at most `actor.entropy_target`, above which there is no bonus."""

    @staticmethod
    def of(config: ActorConfig) -> AlgorithmState:
        """Return the state before the first step."""
        return AlgorithmState(config.kl_ctl, entropy_coeff=config.entropy_coeff)

    def resumed(self, config: ActorConfig) -> AlgorithmState:
        """Return the state of a resumed run: a weight that is not adapted is the recipe's."""
        state = self if config.kl_target is not None else replace(self, kl_ctl=config.kl_ctl)
        if config.entropy_target is None:
            return replace(state, entropy_coeff=config.entropy_coeff, entropy_is_low=True)
        return state

    @property
    def entropy_bonus(self) -> float:
        """Weight of the entropy bonus in the next step."""
        return self.entropy_coeff if self.entropy_is_low else 0.0

    def after(self, config: ActorConfig, metrics: Mapping[str, float], n_samples: int) -> AlgorithmState:
        """Return the state after a step with these metrics on `n_samples` samples.

        A metric that is not finite, as after an update that was skipped, changes nothing.
        """
        metrics = {name: value for name, value in metrics.items() if isfinite(value)}
        mismatch = metrics.get("rollout_mismatch_kl")
        correction = config.rollout_correction
        exceeds = mismatch is not None and mismatch > correction.auto_threshold
        is_auto = correction.method == "auto"
        state = replace(self, corrects_rollout=self.corrects_rollout or (is_auto and exceeds))
        if config.kl_target is not None and "kl_ref" in metrics:
            kl_ctl = adapted_kl(self.kl_ctl, metrics["kl_ref"], config.kl_target, n_samples / config.kl_horizon)
            state = replace(state, kl_ctl=kl_ctl)
        if config.entropy_target is not None and "entropy" in metrics:
            is_low = metrics["entropy"] <= config.entropy_target
            coeff = adapted_entropy(self.entropy_coeff, config.entropy_step, is_low=is_low)
            state = replace(state, entropy_coeff=coeff, entropy_is_low=is_low)
        return state
