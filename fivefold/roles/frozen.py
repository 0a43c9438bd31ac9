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
from fivefold.roles.actor import Actor
from fivefold.roles.models import ModelHandle, Turn, written
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.roles.trainer_worker import Model, TrainerWorker

if TYPE_CHECKING:
    from fivefold.engine.state.dcp_files import WrittenPart


class FrozenModel(ModelHandle):
    """A frozen model in its own processes. Its methods give it its devices while they run."""

    kept: ClassVar[tuple[Offloadable, ...]] = PARAMS
    """The parts of its state that a checkpoint has, if it follows the actor."""
    _which: Model = "own"
    """The model that its processes call so."""

    def logprobs(self, batch: RemoteBatch, temperature: float, column: str) -> tuple[Piece, ...]:
        """Compute log-probs of the trained tokens, as a column of the name `column`."""
        with self.working(*PARAMS) as trainer:
            return trainer.logprobs(batch, self._which, temperature, column)

    def sum_logprobs(self, batch: RemoteBatch) -> npt.NDArray[np.float64]:
        """Return, for each sequence, the sum of its trained tokens' log-probs at temperature 1: float64 [N], nats."""
        with self.working(*PARAMS) as trainer:
            return trainer.sum_logprobs(batch, self._which)

    def top_k(self, batch: RemoteBatch, k: int, temperature: float) -> tuple[Piece, ...]:
        """Compute the k most likely tokens, as the columns `teacher_tokens` and `teacher_token_logprobs`."""
        with self.working(*PARAMS) as trainer:
            return trainer.top_k(batch, k, temperature)

    def scores(self, batch: RemoteBatch, end_token: int) -> npt.NDArray[np.float64]:
        """Return, for each sequence, the value of the state after its end token: float64 [N].

        Args:
            batch: the sequences.
            end_token: it is appended to sequences that lack it.
        """
        with self.working(*PARAMS) as trainer:
            return trainer.scores(batch, end_token)

    def follow(self, actor: Actor) -> None:
        """Let the weights follow the actor's, which must be on its devices; they travel through host memory."""
        with self.working(*PARAMS) as trainer:
            trainer.group.feed(TrainerWorker.follow, actor.host_buckets())

    def snapshot(self, folder: Path) -> None:
        """Copy the weights to host memory, for `write_snapshot`.

        Raises:
            OSError: they are written at once (`TrainerSpec.copies_state`), and some rank could not write.
        """
        with self.working(*PARAMS) as trainer:
            written(trainer.group, trainer.group.call(TrainerWorker.snapshot_ema, folder))

    def write_snapshot(self) -> Sequence[WrittenPart]:
        """Write the files of the last snapshot, in parallel to whatever the processes do. Returns what each rank wrote.

        Raises:
            OSError: some rank could not write.
        """
        group = self.trainer.group
        return written(group, group.control(TrainerWorker.write_ema))

    def load_state(self, folder: Path) -> None:
        """Load weights that `write_snapshot` has written below `folder`, on this layout or any other."""
        with self.working(*PARAMS) as trainer:
            trainer.group.call(TrainerWorker.load_ema, folder)


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
        self.trainer.group.call(TrainerWorker.follow_own)
