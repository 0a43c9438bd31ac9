"""The learning rate of a step and the clipping of its gradients, the same for every engine's optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from fivefold.config.schema.engine import OptimizerConfig

_DECAYS: Mapping[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "exponential": lambda progress: 2.0 * 0.5**progress - 1.0,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""From 1 to 0 as progress goes from 0 to 1."""


def learning_rate(
    step: int, config: OptimizerConfig, total_steps: int, peak: float | None = None, end: float | None = None
) -> float:
    """Return the rate of step `step` (from 0) of `total_steps`: linear warm-up, then what the schedule says.

    No step has rate 0: the first of a warm-up of n steps has rate lr / n, or the recipe's. A decay reaches its end one
    step after the last, as the schedules of torch and transformers do.

    Args:
        step: number of the step.
        config: the schedule.
        total_steps: steps of the whole run.
        peak: the largest rate; None: `config.lr`.
        end: the rate at the end of the decay; None: `config.lr` times `config.min_lr_ratio`.
    """
    peak = config.lr if peak is None else peak
    end = config.lr * config.min_lr_ratio if end is None else end
    warmup = _n_steps(config.warmup_steps, config.warmup_steps_proportion, total_steps)
    if step < warmup:
        start = config.warmup_start_ratio
        return peak * (start + (1.0 - start) * step / warmup) if start else peak * (step + 1) / warmup
    shape: str = config.lr_scheduler_type
    n_decay = total_steps - warmup
    if shape == "wsd":
        shape = config.decay_shape
        n_decay = min(n_decay, _n_steps(config.decay_steps, config.decay_steps_proportion, total_steps))
    progress = min(1.0, max(0, step - (total_steps - n_decay)) / max(1, n_decay))
    if shape == "cosine" and progress < 1.0:
        progress = progress * config.cycles % 1.0
    return end + (peak - end) * _DECAYS[shape](progress)


def _n_steps(steps: int | None, share: float, total_steps: int) -> int:
    # Rounded first, because 0.07 * 100 is a little more than 7.
    return math.ceil(round(share * total_steps, 6)) if steps is None else steps


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor that clips gradients of this global norm to `limit`; a limit of 0 clips nothing.

    Like Megatron-Core and torch, it adds 1e-6 to the norm.
    """
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
