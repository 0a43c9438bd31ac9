"""Ends a run whose held-out data no longer gain: `evaluator.early_stopping`.

evaluation   0.18   0.42   0.61   0.60   0.61   0.59       patience: 3
best         0.18   0.42   0.61   0.61   0.61   0.61       the run ends here
n_since         0      0      0      1      2      3
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fivefold.checkpoints.run_state import BestEvaluation, RunState
from fivefold.config.problems import did_you_mean
from fivefold.config.schema.run import EarlyStoppingConfig, should_fall


def watched(config: EarlyStoppingConfig, measured: Sequence[str]) -> str:
    """Return the measure that early stopping compares.

    Args:
        config: the recipe's section.
        measured: names of what evaluations measure, the most telling one first.

    Raises:
        ValueError: the section names another one.
    """
    if config.metric is None:
        return measured[0]
    if config.metric not in measured:
        raise ValueError(
            f"evaluator.early_stopping.metric={config.metric} is no measure of the held-out data"
            f"{did_you_mean(config.metric, measured)}: name one of {', '.join(measured)}"
        )
    return config.metric


def judged(state: RunState, config: EarlyStoppingConfig, metric: str) -> RunState:
    """Return the state after its last evaluation has been compared with the best one, and why the run ends, if it does.

    An evaluation whose value is not finite is never the best one.
    """
    value, best = _value(state.evaluation_last, metric), state.best_evaluation
    if best is None or best.metric != metric or _exceeds(value, best.value, config.min_gain, metric):
        return replace(state, best_evaluation=BestEvaluation(metric, value, state.step), stopped_early=None)
    best = replace(best, n_since=best.n_since + 1)
    ends = best.n_since >= config.patience
    return replace(state, best_evaluation=best, stopped_early=_told(best) if ends else None)


def _value(evaluation: Mapping[str, float] | None, metric: str) -> float:
    """Return what an evaluation has measured; the worst number for one that is not finite."""
    worst = math.inf if should_fall(metric) else -math.inf
    value = worst if evaluation is None else evaluation[metric]
    return value if math.isfinite(value) else worst


def _exceeds(value: float, best: float, gain: float, metric: str) -> bool:
    if not math.isfinite(value):
        return False
    return value < best - gain if should_fall(metric) else value > best + gain


def _told(best: BestEvaluation) -> str:
    when = f"after step {best.step}" if best.step else "before training"
    return f"{best.n_since} evaluations have not exceeded the held-out {best.metric} of {best.value:.4g} {when}"
