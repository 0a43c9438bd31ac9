"""The frozen model that the KL divergence is measured against, in the actor's processes or in its own."""

from __future__ import annotations

from typing import Protocol

from fivefold.roles.actor import Actor
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.roles.trainer import Trainer

COLUMN = "ref_logprobs"


class Reference(Protocol):
    """The driver's handle of a reference model, whichever processes hold it."""

    def logprobs(self, batch: RemoteBatch, temperature: float) -> tuple[Piece, ...]:
        """Compute log-probs of the trained tokens under the reference, as the column `ref_logprobs`."""


class ReferenceBesideActor:
    """A reference model in the actor's processes."""

    def __init__(self, actors: Trainer) -> None:
        self._actors = actors

    def logprobs(self, batch: RemoteBatch, temperature: float) -> tuple[Piece, ...]:
        """Compute the column `ref_logprobs`, as `Reference` says."""
        return self._actors.logprobs(batch, "reference", temperature, COLUMN)


class ReferenceAlone:
    """A reference model in processes of its own."""

    def __init__(self, trainer: Trainer, actor_on_devices: Actor | None) -> None:
        """`actor_on_devices`: the actor, if it has devices of the reference."""
        self._trainer = trainer
        self._actor_on_devices = actor_on_devices

    def logprobs(self, batch: RemoteBatch, temperature: float) -> tuple[Piece, ...]:
        """Compute the column `ref_logprobs`, as `Reference` says. Models on shared devices release cached memory."""
        if self._actor_on_devices is not None:
            self._actor_on_devices.release()
        pieces = self._trainer.logprobs(batch, "own", temperature, COLUMN)
        self._trainer.release()
        return pieces
