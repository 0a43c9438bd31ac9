"""The driver's handle of a model that is not trained, in processes of its own. Each of them holds a `TrainerWorker`.

Its weights are on its devices while it works; whether they stay there is `offload` of its section.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fivefold.engine.contract import PARAMS
from fivefold.roles.actor import Actor
from fivefold.roles.moved_bytes import MovedBytes
from fivefold.roles.trainer import Trainer
from fivefold.roles.trainer_worker import TrainerWorker


class FrozenModel:
    """A frozen model, which works inside blocks `working`."""

    def __init__(self, trainer: Trainer, *, is_offloaded: bool = False, actor: Actor | None = None) -> None:
        """Take the trainer's handle.

        Args:
            trainer: the handle.
            is_offloaded: whether the weights leave the devices while the model does not work, as they have already.
            actor: the actor, if it has devices of the model.
        """
        self.trainer = trainer
        self.is_offloaded = is_offloaded
        self.moved = MovedBytes()
        """What was moved off the devices and back since the counts were taken."""
        self._actor = actor

    @contextmanager
    def working(self) -> Iterator[Trainer]:
        """Give the model, inside the block, its weights and the memory that the actor has cached."""
        if self._actor is not None:
            self._actor.release()
        if self.is_offloaded:
            self.moved.restored += max(self.trainer.group.call(TrainerWorker.onload, PARAMS))
        yield self.trainer
        if self.is_offloaded:
            self.moved.freed += max(self.trainer.group.call(TrainerWorker.offload, PARAMS))
        if self.is_offloaded or self._actor is not None:
            self.trainer.release()
