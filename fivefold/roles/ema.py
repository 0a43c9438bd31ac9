"""A frozen model whose weights follow a trained one, copied from time to time or as an exponential moving average."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fivefold.cluster.role import Part
from fivefold.roles.snapshots import LastSnapshot, WriteFailed
from fivefold.roles.trainer_worker import Model, TrainerWorker
from fivefold.weights.buckets import Bucket, unpack

if TYPE_CHECKING:
    from fivefold.engine.ema import EMAWeights
    from fivefold.engine.state.dcp_files import WrittenPart


class EMA(Part):
    """The weights of a rank's frozen model: of the reference that shares its processes, or of its only model.

    `TrainerSpec.ema_decay` is the decay of the average.
    """

    def __init__(self, worker: TrainerWorker) -> None:
        """Take the weights as they are now.

        Raises:
            ValueError: no model of these processes follows another.
        """
        self._worker, self._last = worker, LastSnapshot()
        decay = worker.spec.ema_decay
        if decay is None:
            raise ValueError("no model of these processes follows another: set ema_decay of their TrainerSpec")
        self._model: Model = "own" if worker.spec.reference is None else "reference"
        with worker.working(self._model) as engine:
            self._weights: EMAWeights = engine.ema_weights(decay)

    def follow_own(self) -> None:
        """Let the reference's weights follow the trained model in the same processes."""
        with self._worker.working("reference"):
            self._weights.follow(self._worker.engine.held_weights())

    def follow(self, buckets: Iterator[Bucket]) -> None:
        """Let the only model follow the weights in `buckets`, which come from a trained model's processes."""
        self._weights.follow_whole(unpack(buckets, torch.device("cpu")))

    def take(self, folder: Path) -> WriteFailed | None:
        """Copy the weights to host memory, for `write` to write them below `folder`; see `Snapshots.take`."""
        with self._worker.working(self._model):
            return self._last.take(lambda: self._weights.snapshot(folder, copy=self._worker.spec.copies_state))

    def write(self) -> WrittenPart | WriteFailed:
        """Write the files of the last snapshot."""
        return self._last.write()

    def load(self, folder: Path) -> None:
        """Load the weights below `folder`."""
        with self._worker.working(self._model):
            self._weights.load(folder)
