"""The driver's handle of a model that is not trained: a reference, a reward model, a teacher.

It has its own processes, or is in the processes of a model that is trained. It may follow that model: its weights are
then copied from it, or averaged with it, and checkpoints have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from fivefold.engine.contract import PARAMS, Offloadable
from fivefold.engine.heads import Score
from fivefold.roles.actor import Actor
from fivefold.roles.ema import EMA
from fivefold.roles.models import ModelHandle, Turn
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.roles.snapshots import written
from fivefold.roles.trainer_worker import Model

if TYPE_CHECKING:
    from fivefold.engine.state.dcp_files import WrittenPart


class FrozenModel(ModelHandle):
    """A frozen model in its own processes. Its methods give it its devices while they run."""

    kept: ClassVar[tuple[Offloadable, ...]] = PARAMS
    """The parts of its state that a checkpoint has, if it follows the actor."""
    _which: Model = "own"
    """The model that its processes call so."""

    def score(self, batch: RemoteBatch, what: Score) -> tuple[Piece, ...]:
        """Compute a score of the trained tokens, as columns."""
        with self.working(*PARAMS) as trainer:
            return trainer.score(batch, what, self._which)

    def sums(self, batch: RemoteBatch, what: Score) -> npt.NDArray[np.float64]:
        """Return the sum over each sequence's trained tokens of a score with one column: float64 [N]."""
        with self.working(*PARAMS) as trainer:
            return trainer.sums(batch, what, self._which)

    def follow(self, actor: Actor) -> None:
        """Let the weights follow the actor's, which must be on its devices; they travel through host memory."""
        with self.working(*PARAMS) as trainer:
            trainer.group.feed(EMA.follow, actor.host_buckets())

    def snapshot(self, folder: Path) -> None:
        """Copy the weights to host memory, for `write_snapshot`.

        Raises:
            OSError: they are written at once (`TrainerSpec.copies_state`), and some rank could not write.
        """
        with self.working(*PARAMS) as trainer:
            written(trainer.group, trainer.group.call(EMA.take, folder))

    def write_snapshot(self) -> Sequence[WrittenPart]:
        """Write the files of the last snapshot, in parallel to whatever the processes do. Returns what each rank wrote.

        Raises:
            OSError: some rank could not write.
        """
        group = self.trainer.group
        return written(group, group.control(EMA.write))

    def load_state(self, folder: Path) -> None:
        """Load weights that `write_snapshot` has written below `folder`, on this layout or any other."""
        with self.working(*PARAMS) as trainer:
            trainer.group.call(EMA.load, folder)


class HostedModel(FrozenModel):
    """A frozen model in the processes of the actor, whose workers move its weights with the actor's."""

    _which: Model = "reference"

    def __init__(self, actor: Actor) -> None:
        """Take the actor."""
        super().__init__(actor.trainer, Turn(lock=actor.in_turn))
        self._actor = actor

    @property
    def away(self) -> tuple[Offloadable, ...]:
        """What is off the devices while the actor does not work."""
        return self._actor.away

    def follow(self, actor: Actor) -> None:
        """Let the weights follow the actor's, which are in the same processes."""
        self.trainer.group.call(EMA.follow_own)
