"""Checkpoints of a model: each rank copies its state to host memory, and writes it while training continues."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from fivefold.cluster.group import WorkerGroup
from fivefold.cluster.role import Part
from fivefold.roles.trainer_worker import TrainerWorker

if TYPE_CHECKING:
    from fivefold.engine.contract import Snapshot
    from fivefold.engine.state.dcp_files import WrittenPart

Result = TypeVar("Result")


@dataclass(frozen=True)
class WriteFailed:
    """A rank could not write its part of a snapshot."""

    rank: int
    host: str
    reason: str


class LastSnapshot:
    """The last snapshot of a rank. A failure of the file system is a result, because an exception would end the run."""

    def __init__(self) -> None:
        """Have no snapshot yet."""
        self._last: Snapshot | None = None

    def take(self, copy: Callable[[], Snapshot]) -> WriteFailed | None:
        """Keep the snapshot that `copy` returns, for `write`."""
        snapshot = _unless_failed(copy)
        if isinstance(snapshot, WriteFailed):
            return snapshot
        self._last = snapshot
        return None

    def write(self) -> WrittenPart | WriteFailed:
        """Write the files of the snapshot; it may run in parallel with other methods, and again after a failure.

        Raises:
            ValueError: no snapshot was taken.
        """
        if self._last is None:
            raise ValueError("there is nothing to write: take a snapshot first")
        return _unless_failed(self._last.write)


class Snapshots(Part):
    """Snapshots of the training state: master weights, optimizer, random numbers."""

    def __init__(self, worker: TrainerWorker) -> None:
        """Take no snapshot yet."""
        self._engine, self._copies = worker.engine, worker.spec.copies_state
        self._last = LastSnapshot()

    def take(self, folder: Path) -> WriteFailed | None:
        """Copy this rank's state to host memory, for `write` to write it below `folder`.

        Without a copy (`TrainerSpec.copies_state`) it is written at once, and `write` only says what was written.
        """
        return self._last.take(lambda: self._engine.snapshot(folder, copy=self._copies))

    def write(self) -> WrittenPart | WriteFailed:
        """Write the files of the last snapshot."""
        return self._last.write()

    def load(self, folder: Path) -> None:
        """Load the state that was written below `folder`, on this layout or any other, in place of the weights."""
        self._engine.load(folder)


def _unless_failed(action: Callable[[], Result]) -> Result | WriteFailed:
    """Return what `action` returns, or the failure of the file system that ends it."""
    try:
        return action()
    except OSError as error:
        return WriteFailed(dist.get_rank(), socket.gethostname(), str(error))


def written(group: WorkerGroup, results: Sequence[Result | WriteFailed]) -> list[Result]:
    """Return the results of all ranks of a group, if every one could write.

    Raises:
        OSError: some rank could not write.
    """
    failures = [result for result in results if isinstance(result, WriteFailed)]
    if failures:
        first = failures[0]
        raise OSError(f"{first.reason} ({group.name} rank {first.rank} on {first.host})")
    return [result for result in results if not isinstance(result, WriteFailed)]
