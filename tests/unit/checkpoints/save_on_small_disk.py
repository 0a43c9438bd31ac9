"""Saves checkpoints to the small file system at argv[1], and prints a JSON object about each attempt.

`test_disk_faults.py` runs this in a mount namespace of its own. The disk is filled until so many pages are left that
the save fails at its first byte, then at a later one each time, until it succeeds.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from fivefold.bridge.pieces import Piece
from fivefold.checkpoints.checkpointer import Checkpointer, Schedule
from fivefold.checkpoints.manifest import verify
from fivefold.checkpoints.store import TRAINER, CheckpointStore
from fivefold.checkpoints.writer import CheckpointWriter
from fivefold.config.schema.train import TrainRecipe
from fivefold.engine.state.dcp_files import WrittenPart
from fivefold.engine.state.state_store import HostSnapshot, StateWriter, StoredRange
from fivefold.observe.errors import RunFailed
from fivefold.observe.json_records import write_json
from fivefold.observe.jsonl import JsonLines
from fivefold.observe.timers import PhaseTimers
from tests.unit.checkpoints.examples import run_state

PAGE = 4096
N_ELEMENTS = 16_384
"""64 kB."""
RECIPE = TrainRecipe.model_validate(
    {
        "experiment_name": "e",
        "actor": {"path": "m"},
        "train_dataset": {"path": "d"},
        "recover": {"max_to_keep": 1, "write_attempts": 2},
    }
)


class Weights:
    """A role of one process, whose state is one tensor."""

    def __init__(self) -> None:
        pieces = (Piece("weight", (N_ELEMENTS,), (0,), (N_ELEMENTS,), 0),)
        self._writer = StateWriter(0, [StoredRange("param", 0, N_ELEMENTS, pieces)])
        self._snapshot: HostSnapshot | None = None

    def snapshot(self, folder: Path) -> None:
        self._snapshot = self._writer.snapshot(folder, [torch.randn(N_ELEMENTS)], {})

    def write_snapshot(self) -> Sequence[WrittenPart]:
        assert self._snapshot is not None
        return [self._snapshot.write()]


def main(disk: Path) -> None:
    store = CheckpointStore(disk / "checkpoints")
    attempt(store, 1)
    n_pages = 0
    while True:
        fill(disk / "filler", n_pages * PAGE)
        error = attempt(store, 2)
        (disk / "filler").unlink()
        report("full", error, store, n_pages=n_pages)
        if error is None:
            break
        shutil.rmtree(store.path(2), ignore_errors=True)  # what it left would make room for the next attempt
        n_pages += 1
    report("freed", attempt(store, 3), store)
    logs_on_a_full_disk(disk)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    report("read-only", attempt(store, 4), store)


def attempt(store: CheckpointStore, step: int) -> str | None:
    """Save the checkpoint of `step`; return the error."""
    schedule = Schedule(RECIPE.recover, total_steps=9, steps_per_epoch=9)
    notes: list[str] = []
    try:
        writer = CheckpointWriter(RECIPE, store, {TRAINER: Weights()}, PhaseTimers(), notes.append, lambda: True)
        with Checkpointer(writer, schedule=schedule, history=None) as saving:
            saving.begin(run_state(step, kept_metric=None), {})
            saving.commit()
            saving.finish()
    except RunFailed as error:
        assert len(notes) == 2, notes
        return str(error)
    assert notes == []
    return None


def logs_on_a_full_disk(disk: Path) -> None:
    """Report what becomes of lines and of `status.json` when the disk is full."""
    write_json(disk / "status.json", {"state": "running"})
    fill(disk / "filler", 0)
    errors = []
    try:
        with JsonLines(disk / "metrics.jsonl") as lines:
            for step in range(10_000):
                lines.write({"step": step})
    except OSError as error:
        errors.append(str(error))
    try:
        write_json(disk / "status.json", {"state": "failed", "error": "x" * PAGE})
    except OSError as error:
        errors.append(str(error))
    (disk / "filler").unlink()
    print(json.dumps({"case": "logs", "errors": errors, "status": json.loads((disk / "status.json").read_text())}))


def fill(filler: Path, leave: int) -> None:
    """Write a file that takes the disk but for `leave` bytes."""
    with filler.open("wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(PAGE))
        file.truncate(max(file.tell() - leave, 0))


def report(case: str, error: str | None, store: CheckpointStore, **facts: int) -> None:
    problems = [problem for each in store.all() for problem in verify(each.path, deep=True)]
    latest = store.latest()
    assert latest is not None
    print(json.dumps({"case": case, "error": error, "latest": latest.step, "problems": problems, **facts}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
