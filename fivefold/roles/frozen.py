"""The driver's handle of a model that is not trained, in processes of its own. Each of them holds a `TrainerWorker`.

Its weights are on its devices while it works; whether they stay there is `offload` of its section. Several threads may
ask it, one at a time: in asynchronous training, a reward model scores beside the updates, and in evaluations.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fivefold.engine.contract import PARAMS
from fivefold.roles.actor import Actor
from fivefold.roles.moved_bytes import MovedBytes
from fivefold.roles.trainer import Trainer
from fivefold.roles.trainer_worker import TrainerWorker


class FrozenModel:
    """A frozen model, which works inside blocks `working`."""

    def __init__(
        self,
        trainer: Trainer,
        *,
        is_offloaded: bool = False,
        actor: Actor | None = None,
        in_turn: threading.RLock | None = None,
    ) -> None:
        """Take the trainer's handle.

        Args:
            trainer: the handle.
            is_offloaded: whether the weights leave the devices while the model does not work, as they have already.
            actor: the actor, if it has devices of the model.
            in_turn: held while the model works; None: the actor's, or one of its own.
        """
        self.trainer = trainer
        self.is_offloaded = is_offloaded
        self.moved = MovedBytes()
        """What was moved off the devices and back since the counts were taken."""
        self._actor = actor
        self._in_turn = in_turn or (threading.RLock() if actor is None else actor.in_turn)

    @contextmanager
    def working(self) -> Iterator[Trainer]:
        """Give the model, inside the block, its weights and the memory that the actor has cached.

        The block is entered when neither another thread asks the model nor one that shares its devices trains.
        """
        with self._in_turn:
            if self._actor is not None:
                self._actor.release()
            if self.is_offloaded:
                restored = max(self.trainer.group.call(TrainerWorker.onload, PARAMS))
                self.moved.restored += restored
            yield self.trainer
            if self.is_offloaded:
                freed = max(self.trainer.group.call(TrainerWorker.offload, PARAMS))
                self.moved.freed += freed
            if self.is_offloaded or self._actor is not None:
                self.trainer.release()
