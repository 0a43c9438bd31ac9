"""The learning rate of a step and the clipping of its gradients, the same for every engine's optimizer."""

from __future__ import annotations

import math

from fivefold.config.schema.engine import OptimizerConfig


def learning_rate(
    step: int, config: OptimizerConfig, total_steps: int, peak: float | None = None, end: float | None = None
) -> float:
    """Return the rate of step `step` (from 0) of `total_steps`: linear warm-up, then constant, linear or cosine.

    No step has rate 0: the first of a warm-up of n steps has rate lr / n, and a decay reaches its end one step after
    the last, as the schedules of torch and transformers do.

    Args:
        step: number of the step.
        config: the schedule.
        total_steps: steps of the whole run.
        peak: the largest rate; None: `config.lr`.
        end: the rate at the end of the decay; None: `config.lr` times `config.min_lr_ratio`.
    """
    peak = config.lr if peak is None else peak
    end = config.lr * config.min_lr_ratio if end is None else end
    warmup = config.warmup_steps
    if warmup is None:
        # Rounded first, because 0.07 * 100 is a little more than 7.
        warmup = math.ceil(round(config.warmup_steps_proportion * total_steps, 6))
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    decay = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[config.lr_scheduler_type]
    return end + (peak - end) * decay


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor that clips gradients of this global norm to `limit`; a limit of 0 clips nothing.

    Like Megatron-Core and torch, it adds 1e-6 to the norm.
    """
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
