"""Runs that evaluations end early, what their checkpoints know of it, and what more patience does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from fivefold.checkpoints.run_state import FILE
from fivefold.checkpoints.store import CheckpointStore
from fivefold.observe.json_records import records
from fivefold.observe.run_dir import RunDir
from tests.e2e.conftest import ROOT, Fivefold

KEYS = (
    "sft", str(ROOT / "recipes" / "tiny-moe-sft.yaml"), "actor.path=package:tiny-moe", "actor.init_from_scratch=false",
    "actor.backend=megatron:d1", "actor.dtype=float32", "actor.optimizer.lr=1e-3",
    "train_dataset={path: package:arithmetic/pairs_train, response_key: chosen, batch_size: 4, limit: 100, "
    "max_length: 64, hold_out: 8}",
    "valid_dataset=null", "total_train_steps=10", "evaluator.freq_steps=2",
    "stats.trackers=[]",
)  # fmt: skip
"""A run whose loss falls by less than the gain that the tests ask for."""


Run = Callable[[str, int], tuple[RunDir, dict[str, Any], list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def run(fivefold: Fivefold, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run(name, patience)`: train under this name; return its folder, summary and metrics."""
    root = tmp_path_factory.mktemp("runs")

    def train(name: str, patience: int) -> tuple[RunDir, dict[str, Any], list[dict[str, Any]]]:
        stopping = f"evaluator.early_stopping={{patience: {patience}, min_gain: 100}}"
        result = fivefold(*KEYS, stopping, f"cluster.fileroot={root}", "experiment_name=stops", f"trial_name={name}")
        assert result.returncode == 0, result.stderr + result.stdout
        folder = RunDir(root / "stops" / name)
        return folder, json.loads(folder.summary.read_text()), list(records(folder.metrics))

    return train


def test_a_run_ends_after_evaluations_without_gain(run: Run) -> None:
    folder, summary, rows = run("early", 2)
    assert (summary["steps"], len(rows)) == (4, 4)
    why = f"2 evaluations have not exceeded the held-out nll of {summary['nll_before']:.4g} before training"
    assert summary["stopped_early"] == why
    assert [step for step, row in enumerate(rows, start=1) if "eval/nll" in row] == [2, 4]
    checkpoint = CheckpointStore(folder.checkpoints).all()[-1]
    assert (checkpoint.step, json.loads((checkpoint.path / FILE).read_text())["stopped_early"]) == (4, why)
    assert (folder.weights / "model.safetensors").is_file()
    began = folder.status.stat().st_mtime_ns
    assert run("early", 2)[1] == summary
    assert folder.status.stat().st_mtime_ns == began


@pytest.mark.long
def test_a_run_that_ended_early_trains_further_with_more_patience(run: Run) -> None:
    run("early", 2)
    (folder, patient, rows), (whole_folder, whole, others) = run("early", 3), run("whole", 3)
    assert (patient["steps"], whole["steps"]) == (6, 6)
    values = ("loss", "grad_norm", "lr", "eval/nll")
    one, other = ([{name: row.get(name) for name in values} for row in each] for each in (rows, others))
    assert one == other
    weights = [(each.weights / "model.safetensors").read_bytes() for each in (folder, whole_folder)]
    assert weights[0] == weights[1]
