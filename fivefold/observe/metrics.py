"""The log of a run's metrics: `metrics.jsonl`, TensorBoard and other trackers."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from fivefold.observe.durable import naming
from fivefold.observe.jsonl import JsonLines
from fivefold.observe.trackers.background import Trackers

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class MetricsLog:
    """One line of `metrics.jsonl` for each step, and the same numbers as TensorBoard scalars.

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
            trackers: the run's other trackers; None: there are none.
            first_step: the first step that will be written. TensorBoard then ignores what an earlier start of the run
                has written for this step and later ones; the lines of the file are cut back with `jsonl.cut_back`.
        """
        self._lines = JsonLines(path)
        self._tensorboard = tensorboard
        self._board = None if tensorboard is None else _open_board(tensorboard, first_step)
        self._trackers = trackers
        self._lock = threading.Lock()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the numbers of `step`; they are on disk when this returns."""
        self._lines.write({"step": step, **metrics})
        if self._board is not None and self._tensorboard is not None:
            with self._lock, naming(self._tensorboard):
                for name, value in metrics.items():
                    self._board.add_scalar(name, value, step)
                self._board.flush()
        if self._trackers is not None:
            self._trackers.log(step, metrics)

    def sync(self) -> None:
        """Wait until all that was written is on the disk, where it survives the machine."""
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
            with naming(self._tensorboard):  # the error of an earlier write, which TensorBoard raises once more
                self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_board(folder: Path, first_step: int) -> SummaryWriter:
    # Imported here, because it takes a second and imports torch; errors of the command line must not wait for that.
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(log_dir=str(folder), purge_step=first_step if first_step > 1 else None)
