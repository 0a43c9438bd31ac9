"""The driver's handle of a model that is not trained: a reference, a reward model, a teacher.

It has its own processes, or is in the processes of a model that is trained. It may follow that model: its weights are
then copied from it, or averaged with it, and checkpoints have them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fivefold.engine.contract import PARAMS, Offloadable
from fivefold.engine.scores import Score
from fivefold.roles.actor import Actor
from fivefold.roles.ema import EMA
from fivefold.roles.models import ModelHandle, Turn
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.roles.trainer_worker import Model


class FrozenModel(ModelHandle):
    """A frozen model in its own processes. Its methods give it its devices while they run."""

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
