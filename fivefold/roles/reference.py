"""The model that the actor is compared with, in the actor's processes or in its own.

It is not trained, but may follow the actor: its weights are then copied from the actor's, or averaged with them, and
checkpoints have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from fivefold.roles.actor import Actor
from fivefold.roles.frozen import FrozenModel
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.roles.trained import written
from fivefold.roles.trainer import Trainer
from fivefold.roles.trainer_worker import TrainerWorker

if TYPE_CHECKING:
    from fivefold.engine.state.state_store import WrittenPart

COLUMN = "ref_logprobs"


class Reference(Protocol):
    """The driver's handle of a reference model, whichever processes hold it."""

    def logprobs(self, batch: RemoteBatch, temperature: float) -> tuple[Piece, ...]:
        """Compute log-probs of the trained tokens under the reference, as the column `ref_logprobs`."""

    def sum_logprobs(self, batch: RemoteBatch) -> npt.NDArray[np.float64]:
        """Return, for each sequence, the sum of its trained tokens' log-probs at temperature 1: float64 [N], nats."""

    def follow(self, actor: Actor) -> None:
        """Let the weights follow the actor's, which must be on its devices."""

    def snapshot(self, folder: Path) -> None:
        """Copy the weights to host memory, for `write_snapshot`.

        Raises:
            OSError: they are written at once (`TrainerSpec.copies_state`), and some rank could not write.
        """

    def write_snapshot(self) -> Sequence[WrittenPart]:
        """Write the files of the last snapshot, beside whatever the processes do. Returns what each rank wrote.

        Raises:
            OSError: some rank could not write.
        """

    def load_state(self, folder: Path) -> None:
        """Load weights that `write_snapshot` has written below `folder`, on this layout or any other."""


class ReferenceBesideActor:
    """A reference model in the actor's processes."""

    def __init__(self, actors: Trainer) -> None:
        self._actors = actors

    def logprobs(self, batch: RemoteBatch, temperature: float) -> tuple[Piece, ...]:
        """Compute the column `ref_logprobs`, as `Reference` says."""
        return self._actors.logprobs(batch, "reference", temperature, COLUMN)

    def sum_logprobs(self, batch: RemoteBatch) -> npt.NDArray[np.float64]:
        """Return the sum of each sequence's log-probs, as `Reference` says."""
        return self._actors.sum_logprobs(batch, "reference")

    def follow(self, actor: Actor) -> None:
        """Let the weights follow the actor's, which are in the same processes."""
        self._actors.group.call(TrainerWorker.follow_own)

    def snapshot(self, folder: Path) -> None:
        """Copy the weights to host memory, as `Reference` says."""
        written(self._actors.group, self._actors.group.call(TrainerWorker.snapshot_ema, folder))

    def write_snapshot(self) -> Sequence[WrittenPart]:
        """Write the files of the last snapshot, as `Reference` says."""
        return written(self._actors.group, self._actors.group.control(TrainerWorker.write_ema))

    def load_state(self, folder: Path) -> None:
        """Load the weights below `folder`."""
        self._actors.group.call(TrainerWorker.load_ema, folder)


class ReferenceAlone:
    """A reference model in processes of its own."""

    def __init__(self, model: FrozenModel) -> None:
        self.model = model

    def logprobs(self, batch: RemoteBatch, temperature: float) -> tuple[Piece, ...]:
        """Compute the column `ref_logprobs`, as `Reference` says."""
        with self.model.working() as trainer:
            return trainer.logprobs(batch, "own", temperature, COLUMN)

    def sum_logprobs(self, batch: RemoteBatch) -> npt.NDArray[np.float64]:
        """Return the sum of each sequence's log-probs, as `Reference` says."""
        with self.model.working() as trainer:
            return trainer.sum_logprobs(batch, "own")

    def follow(self, actor: Actor) -> None:
        """Let the weights follow the actor's, which are sent in buckets through host memory."""
        with self.model.working() as trainer:
            trainer.group.feed(TrainerWorker.follow, actor.host_buckets())

    def snapshot(self, folder: Path) -> None:
        """Copy the weights to host memory, as `Reference` says."""
        with self.model.working() as trainer:
            written(trainer.group, trainer.group.call(TrainerWorker.snapshot_ema, folder))

    def write_snapshot(self) -> Sequence[WrittenPart]:
        """Write the files of the last snapshot, as `Reference` says."""
        group = self.model.trainer.group
        return written(group, group.control(TrainerWorker.write_ema))

    def load_state(self, folder: Path) -> None:
        """Load the weights below `folder`."""
        with self.model.working() as trainer:
            trainer.group.call(TrainerWorker.load_ema, folder)
