"""When checkpoints are written, which of them stay, and what becomes of failures in the background."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Mapping, Sequence
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from fivefold.checkpoints.checkpointer import Checkpointer, Schedule
from fivefold.checkpoints.manifest import FileEntry, Manifest, verify
from fivefold.checkpoints.run_state import RunState
from fivefold.checkpoints.store import TRAINER, CheckpointStore
from fivefold.checkpoints.writer import CheckpointWriter
from fivefold.config.schema.train import TrainRecipe
from fivefold.engine.state.dcp_files import WrittenPart
from fivefold.observe.errors import RunFailed
from fivefold.observe.timers import PhaseTimers
from tests.unit.checkpoints.examples import run_state
from tests.unit.checkpoints.save_on_small_disk import Weights

METRIC = "reward/mean"
TAKEN_OVER = "taken-over"
"""A file that says that another process has the folder."""


class FailingWeights(Weights):
    """Weights whose first writes fail."""

    def __init__(self, n_failures: int) -> None:
        super().__init__()
        self._left = n_failures

    def write_snapshot(self) -> Sequence[WrittenPart]:
        if self._left:
            self._left -= 1
            raise OSError(5, "Input/output error", "a file")
        return super().write_snapshot()


class SlowWeights(Weights):
    """Weights that are written when they are told to."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = threading.Event()

    def write_snapshot(self) -> Sequence[WrittenPart]:
        assert self.may_write.wait(60)
        return super().write_snapshot()


def checkpointer(folder: Path, *owners: Weights, notes: list[str] | None = None, **recover: object) -> Checkpointer:
    recipe = TrainRecipe.model_validate(
        {
            "experiment_name": "e", "actor": {"path": "m"}, "train_dataset": {"path": "d"},
            "valid_dataset": {"path": "v"}, "recover": {"freq_secs": None, **recover},
        }
    )  # fmt: skip
    schedule = Schedule(recipe.recover, total_steps=50, steps_per_epoch=20)
    note = ([] if notes is None else notes).append
    store = CheckpointStore(folder)
    by_folder = dict(zip((TRAINER, "critic"), owners, strict=False))
    writer = CheckpointWriter(
        recipe, store, by_folder, PhaseTimers(), note, is_ours=lambda: not (folder / TAKEN_OVER).exists()
    )
    return Checkpointer(writer, schedule=schedule, history=None)


def steps(folder: Path) -> list[int]:
    checkpoints = CheckpointStore(folder).all()
    assert not [line for each in checkpoints for line in verify(each.path, deep=True)]
    return [each.step for each in checkpoints]


def saved_if_due(saving: Checkpointer, step: int, value: float) -> bool:
    """Write the checkpoint of a step with this value of the metric, if it is due; return whether it was."""
    if not saving.is_due(step, {METRIC: value}):
        return False
    saving.begin(run_state(step, kept_metric=None), {METRIC: value})
    saving.commit()
    saving.finish()
    return True


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    rewards = {1: 0.1, 2: 0.5, 3: 0.3, 4: 0.2, 5: 0.4}
    with checkpointer(tmp_path, Weights(), freq_steps=2, max_to_keep=1, keep_best=METRIC) as saving:
        due = [step for step, reward in rewards.items() if saved_if_due(saving, step, reward)]
    # Steps 1 and 2 have the largest value so far, and 2 and 4 are multiples of freq_steps.
    assert due == [1, 2, 4]
    assert steps(tmp_path) == [2, 4]
    saved = RunState.read(CheckpointStore(tmp_path).path(4)).kept_metric
    assert saved is not None
    assert saved.values == {1: 0.1, 2: 0.5, 4: 0.2}


def test_a_step_whose_metric_is_not_finite_is_never_the_best(tmp_path: Path) -> None:
    values = {1: nan, 2: nan, 3: 0.1, 4: inf, 5: 0.05, 6: 0.2}
    with checkpointer(tmp_path, Weights(), freq_steps=2, max_to_keep=1, keep_best=METRIC) as saving:
        due = [step for step, value in values.items() if saved_if_due(saving, step, value)]
    assert due == [2, 3, 4, 6]
    assert steps(tmp_path) == [6]
    saved = RunState.read(CheckpointStore(tmp_path).path(6)).kept_metric
    assert saved is not None
    assert saved.values == {3: 0.1, 6: 0.2}


def test_a_metric_that_steps_do_not_have_is_told_once(tmp_path: Path) -> None:
    told = {}
    step, evaluated = {"accuracy": 0.5, "loss": 1.0}, {"accuracy": 0.5, "eval/accuracy": 0.5}
    for name in ("acuracy", "nothing", "eval/acuracy", "accuracy", "eval/accuracy"):
        told[name] = []
        with checkpointer(tmp_path, Weights(), notes=told[name], keep_best=name) as saving:
            for number, metrics in enumerate((step, step, evaluated, evaluated), start=1):
                saving.is_due(number, metrics)
    assert told == {
        "acuracy": ["recover.keep_best=acuracy: step 1 has no such metric; did you mean accuracy?"],
        "nothing": ["recover.keep_best=nothing: step 1 has no such metric"],
        "eval/acuracy": ["recover.keep_best=eval/acuracy: step 3 has no such metric; did you mean eval/accuracy?"],
        "accuracy": [],
        "eval/accuracy": [],
    }


def test_a_process_that_has_lost_the_folder_commits_nothing(tmp_path: Path) -> None:
    with checkpointer(tmp_path, Weights()) as saving:
        saving.begin(run_state(1, kept_metric=None), {})
        saving.commit()
        saving.finish()
        saving.begin(run_state(2, kept_metric=None), {})
        (tmp_path / TAKEN_OVER).touch()
        saving.commit()
        with pytest.raises(RunFailed, match="step 2 is not committed: another process has taken over"):
            saving.finish()
    assert steps(tmp_path) == [1]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    owner = SlowWeights()
    with checkpointer(tmp_path, owner) as saving:
        saving.begin(run_state(1, kept_metric=None), {})
        saving.commit()
        for _ in range(3):
            saving.commit()  # nothing was begun in these steps
        assert steps(tmp_path) == []
        owner.may_write.set()
        saving.finish()
        assert steps(tmp_path) == [1]


def test_a_write_that_fails_is_repeated(tmp_path: Path) -> None:
    notes: list[str] = []
    with checkpointer(tmp_path, FailingWeights(2), notes=notes, write_attempts=3) as saving:
        saving.begin(run_state(1, kept_metric=None), {})
        saving.commit()
        saving.finish()
    assert steps(tmp_path) == [1]
    assert len(notes) == 2
    assert all("Input/output error" in note for note in notes)


def test_an_old_checkpoint_that_cannot_be_deleted_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree

    def held_by_a_reader(path: Path, ignore_errors: bool = False) -> None:
        if path.name != "step-000001":
            remove(path, ignore_errors=ignore_errors)
        elif not ignore_errors:
            raise OSError(16, "Device or resource busy", f"{path}/trainer/.nfs01")

    monkeypatch.setattr(shutil, "rmtree", held_by_a_reader)
    notes: list[str] = []
    with checkpointer(tmp_path, Weights(), notes=notes, freq_steps=1, max_to_keep=1) as saving:
        assert all(saved_if_due(saving, step, 0.0) for step in (1, 2, 3))
        assert steps(tmp_path) == [3]
        assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-000001", "step-000003"]
        monkeypatch.undo()
        assert saved_if_due(saving, 4, 0.0)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000004"]
    [note] = notes
    assert "could not be deleted" in note
    assert ".nfs01" in note


def test_a_disk_that_is_full_between_two_copies_is_attempted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, failures = Path.mkdir, [OSError(28, "No space left on device")]

    def full_once(path: Path, **options: Any) -> None:
        if path.name == "critic" and failures:
            raise failures.pop()
        make(path, **options)

    monkeypatch.setattr(Path, "mkdir", full_once)
    with checkpointer(tmp_path, Weights(), Weights()) as saving:
        saving.begin(run_state(1, kept_metric=None), {})
        saving.commit()
        saving.finish()
    assert steps(tmp_path) == [1]


def test_a_write_that_always_fails_ends_the_run_in_one_of_the_next_steps(tmp_path: Path) -> None:
    with checkpointer(tmp_path, FailingWeights(0)) as saving:
        saving.begin(run_state(1, kept_metric=None), {})
        saving.commit()
        saving.finish()

    def go_on() -> None:
        with checkpointer(tmp_path, FailingWeights(9), write_attempts=2) as saving:
            saving.begin(run_state(2, kept_metric=None), {})
            for _ in range(600):
                saving.commit()
                threading.Event().wait(0.1)

    with pytest.raises(RunFailed, match=r"checkpoint of step 2 .* in 2 attempts .* Input/output error.*/step-000001\."):
        go_on()
    assert steps(tmp_path) == [1]


def test_every_role_has_a_folder_of_its_own(tmp_path: Path) -> None:
    with checkpointer(tmp_path, Weights(), Weights()) as saving:
        saving.begin(run_state(1, kept_metric=None), {})
        saving.commit()
        saving.finish()
    assert steps(tmp_path) == [1]
    files = CheckpointStore(tmp_path).all()[0].manifest().files
    assert {"trainer/.metadata", "critic/.metadata"} <= files.keys()
    with pytest.raises(ValueError, match=r"critic/\.metadata is not in the manifest"):
        CheckpointStore(tmp_path).commit(tmp_path / "step-000001", Manifest(1, "", "", without_critic(files)))


def without_critic(files: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
    return {name: entry for name, entry in files.items() if not name.startswith("critic")}


def test_without_recovery_nothing_is_due(tmp_path: Path) -> None:
    with checkpointer(tmp_path, Weights(), mode="disabled", freq_steps=1) as saving:
        assert not any(saving.is_due(step, {METRIC: 1.0}) for step in range(1, 51))
