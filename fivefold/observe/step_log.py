"""What a run records of each step: its metrics and its samples.

metrics.jsonl    one line per step; the same numbers go to TensorBoard and other trackers
samples.jsonl    one line per sample, on the disk before the step's update
samples/         the same samples with the values of their tokens, in parts (`fivefold.observe.sample_parts`)
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fivefold.observe.durable import name_file, naming
from fivefold.observe.jsonl import JsonLines, finite
from fivefold.observe.sample_parts import REWARD, TokenValues, part_name, write_part
from fivefold.observe.trackers.background import Trackers

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

MOST_ROWS = 1024
"""Samples after which a part is written."""
LEAST_SECONDS = 10.0
"""Least time between two parts of fewer samples."""
SHARE_OF_RUN = 0.01
"""Least time between two parts as a share of the log's age, so that a long run leaves a few hundred parts."""


class MetricsLog:
    """One line of `metrics.jsonl` per step, and the same numbers as TensorBoard scalars and in other trackers.

        {"step": 3, "reward/mean": 0.41, "lr": 1e-06, "seconds/rollout": 2.9, ...}

    A value that is not finite is null in the file and NaN in TensorBoard. Several threads may write.
    """

    def __init__(
        self, path: Path, tensorboard: Path | None, trackers: Trackers | None = None, *, first_step: int = 1
    ) -> None:
        """Open the log.

        Args:
            path: the JSON lines file.
            tensorboard: folder of TensorBoard's event files; None: no TensorBoard.
            trackers: the run's other trackers, if any.
            first_step: the first step to be written. TensorBoard ignores what an earlier start has written for this
                and later steps; `jsonl.cut_back` removes those lines from the file.
        """
        self._lines = JsonLines(path)
        self._tensorboard = tensorboard
        self._board = None if tensorboard is None else _open_board(tensorboard, first_step)
        self._trackers = trackers
        self._lock = threading.Lock()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the numbers of a step. They are on disk when this returns."""
        self._lines.write({"step": step, **metrics})
        if self._board is not None and self._tensorboard is not None:
            try:
                with self._lock:
                    for name, value in metrics.items():
                        self._board.add_scalar(name, value, step)
                    self._board.flush()
            except OSError as error:
                name_file(error, self._tensorboard)
                raise
        if self._trackers is not None:
            self._trackers.log(step, metrics)

    def sync(self) -> None:
        """Wait until everything written is on the disk and survives a crash of the machine."""
        self._lines.sync()
        if self._board is not None and self._tensorboard is not None:
            with self._lock, naming(self._tensorboard):
                self._board.flush()
            for file in self._tensorboard.iterdir():
                with file.open("rb") as events:
                    os.fsync(events.fileno())

    def close(self) -> None:
        """Close the files."""
        self._lines.close()
        if self._board is not None and self._tensorboard is not None:
            with naming(self._tensorboard):  # TensorBoard raises the error of an earlier write once more
                self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_board(folder: Path, first_step: int) -> SummaryWriter:
    # Imported here because it takes a second and imports torch; errors of the command line should not wait for that.
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=str(folder), purge_step=first_step if first_step > 1 else None)


class SampleLog:
    """Writes the samples of each step: first their texts, then the values of their tokens.

        log.write(records)            # before the update, so that a failing update leaves its samples
        log.complete(token_values)    # once the values are known, in the order of the records

    Call `complete` after every `write`.
    """

    def __init__(self, lines: Path, parts: Path, trackers: Trackers | None = None) -> None:
        """Open the log.

        Args:
            lines: the JSON lines file.
            parts: folder of the parquet files, created with the first one.
            trackers: the run's trackers, if any, which show the last samples.
        """
        self._lines = JsonLines(lines)
        self._parts = parts
        self._trackers = trackers
        self._open: list[dict[str, Any]] = []
        self._rows: list[dict[str, Any]] = []
        self._began = self._written = time.monotonic()

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append the records of a step's samples to the lines."""
        for record in records:
            self._lines.write(record)
        self._open = [_row(record) for record in records]
        if self._trackers is not None:
            self._trackers.samples(records)

    def complete(self, values: Sequence[TokenValues] | None = None) -> None:
        """Add the samples of the last `write` to the columns, with the values of their tokens if there are any."""
        for row, tokens in zip(self._open, values or (), strict=False):
            row |= vars(tokens)
        self._rows += self._open
        self._open = []
        now = time.monotonic()
        is_time = now - self._written > max(LEAST_SECONDS, SHARE_OF_RUN * (now - self._began))
        if len(self._rows) >= MOST_ROWS or is_time:
            self._write_part()

    def sync(self) -> None:
        """Wait until all samples are on the disk and survive a crash of the machine."""
        self._lines.sync()
        self._write_part()

    def close(self) -> None:
        """Write what is left, and close the files."""
        self._rows += self._open
        self._open = []
        self._write_part()
        self._lines.close()

    def _write_part(self) -> None:
        self._written = time.monotonic()
        if self._rows:
            self._parts.mkdir(exist_ok=True)
            write_part(self._parts / part_name(self._rows), self._rows)
            self._rows = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a record of the lines."""
    truth = record.get("ground_truth")
    text = (
        truth if isinstance(truth, str) or truth is None else json.dumps(finite(truth), ensure_ascii=False, default=str)
    )
    rewards = {name.removeprefix(REWARD): value for name, value in record.items() if name.startswith(REWARD)}
    return {**record, "ground_truth": text, "rewards": rewards}
