"""When evaluations end a run early."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from fivefold.checkpoints.run_state import MetricHistory, RunState
from fivefold.config.schema.run import EarlyStoppingConfig, should_fall
from fivefold.run.early_stopping import judged


def state(**fields: Any) -> RunState:
    plain: dict[str, Any] = dict.fromkeys(RunState.__dataclass_fields__)
    return RunState(**{**plain, "step": 0, "total_steps": 1000, **fields})


@pytest.mark.parametrize("metric", ["accuracy", "nll", "reward/set/hard", "loss"])
@pytest.mark.parametrize("gain", [0.0, 0.25])
def test_patience_counts_evaluations_since_the_last_best_one(metric: str, gain: float) -> None:
    """Against a search through all values: the run ends once none of the last ones has exceeded the best before."""
    draw = random.Random(f"{metric} {gain}")
    for patience in (1, 2, 3):
        values = [round(draw.uniform(0, 1), 1) for _ in range(40)]
        sign = -1 if should_fall(metric) else 1

        def ends_at(values: list[float] = values, patience: int = patience, sign: int = sign) -> int:
            best, place = sign * values[0], 0
            for n, value in enumerate(values):
                if sign * value > best + gain:
                    best, place = sign * value, n
                if n - place == patience:
                    return n
            raise AssertionError

        run, config = state(), EarlyStoppingConfig(patience=patience, min_gain=gain)
        for n, value in enumerate(values):
            run = judged(replace(run, step=n, evaluation_last={metric: value}), config, metric)
            if run.stopped_early:
                break
        assert run.step == ends_at()
        assert run.has_stopped(config)
        assert not run.has_stopped(EarlyStoppingConfig(patience=patience + 1, min_gain=gain))
        assert not run.has_stopped(None)
        assert not run.has_stopped(EarlyStoppingConfig(patience=patience, metric="other"))


def test_an_evaluation_that_is_not_finite_is_never_the_best_one() -> None:
    config = EarlyStoppingConfig(patience=2)
    run = state()
    for step, value in enumerate([float("nan"), 0.5, float("-inf"), float("nan")]):
        run = judged(replace(run, step=step, evaluation_last={"nll": value}), config, "nll")
    assert run.best_evaluation is not None
    assert (run.best_evaluation.value, run.best_evaluation.step) == (0.5, 1)
    assert run.stopped_early == "2 evaluations have not exceeded the held-out nll of 0.5 after step 1"


def test_the_best_checkpoint_of_a_loss_has_its_smallest_value() -> None:
    for name, best in (("eval/nll", 2), ("nll", 2), ("eval/loss", 2), ("eval/accuracy", 1)):
        history = MetricHistory(name, {1: 0.9, 2: 0.4, 3: 0.7})
        assert history.best([1, 2, 3]) == best
        assert history.exceeds(0.3, [1, 2, 3]) is (best == 2)
        assert history.exceeds(1.0, [1, 2, 3]) is (best == 1)
        assert not history.exceeds(history.values[best], [1, 2, 3])
