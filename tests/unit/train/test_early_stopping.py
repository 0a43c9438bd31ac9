"""When evaluations end a run early, and what a checkpoint knows of it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fivefold import Run
from fivefold.checkpoints.run_state import FILE, MetricHistory, RunState
from fivefold.checkpoints.store import CheckpointStore
from fivefold.config.schema.run import EarlyStoppingConfig, should_fall
from fivefold.observe.run_dir import RunDir
from fivefold.run.early_stopping import judged

ROOT = Path(__file__).resolve().parents[3]


def recipe(root: Path, name: str, **stopping: Any) -> dict[str, Any]:
    """Return a recipe of four steps a second, whose loss falls by less than any gain that is asked for."""
    return {
        "experiment_name": name,
        "cluster": {"n_gpus_per_node": 0, "fileroot": str(root)},
        "actor": {
            "path": "package:tiny-moe",
            "backend": "megatron:d1",
            "dtype": "float32",
            "optimizer": {"lr": 1.0e-3, "lr_scheduler_type": "linear"},
        },
        "train_dataset": {
            "path": "package:arithmetic/pairs_train",
            "response_key": "chosen",
            "batch_size": 4,
            "limit": 100,
            "max_length": 64,
            "hold_out": 8,
        },
        "total_train_steps": 10,
        "evaluator": {"freq_steps": 2, "early_stopping": stopping},
        "stats": {"trackers": []},
    }


def test_a_run_ends_after_evaluations_without_gain_and_trains_further_with_more_patience(tmp_path: Path) -> None:
    early = Run(recipe(tmp_path, "early", patience=2, min_gain=100))
    summary = early.finish()
    assert (summary["steps"], len(early.metrics())) == (4, 4)
    why = f"2 evaluations have not exceeded the held-out nll of {summary['nll_before']:.4g} before training"
    assert summary["stopped_early"] == why
    assert [step for step, row in enumerate(early.metrics(), start=1) if "eval/nll" in row] == [2, 4]
    folder = RunDir.of(early.recipe)
    (checkpoint,) = CheckpointStore(folder.checkpoints).all()
    assert (checkpoint.step, json.loads((checkpoint.path / FILE).read_text())["stopped_early"]) == (4, why)
    assert (folder.weights / "model.safetensors").is_file()
    began = folder.status.stat().st_mtime_ns
    assert Run(recipe(tmp_path, "early", patience=2, min_gain=100)).finish() == summary
    assert folder.status.stat().st_mtime_ns == began

    patient = Run(recipe(tmp_path, "early", patience=3, min_gain=100))
    whole = Run(recipe(tmp_path, "whole", patience=3, min_gain=100))
    assert (patient.finish()["steps"], whole.finish()["steps"]) == (6, 6)
    values = ("loss", "grad_norm", "lr", "eval/nll")
    one, other = ([{name: row.get(name) for name in values} for row in run.metrics()] for run in (patient, whole))
    assert one == other
    weights = [(RunDir.of(run.recipe).weights / "model.safetensors").read_bytes() for run in (patient, whole)]
    assert weights[0] == weights[1]


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
