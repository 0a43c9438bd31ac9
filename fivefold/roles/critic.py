"""The driver's handle of the critic, which learns what states are worth. Each of its processes holds a `TrainerWorker`.

A critic that shares devices is there only while it works: then its state is on the devices, and the actor's, as far as
that is offloaded, is not.

    actor    ████████        ██████████████████
    critic           ████████
                     working
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fivefold.algorithms.gae import GAE, EstimateMoments
from fivefold.algorithms.kl_in_reward import KLInReward
from fivefold.algorithms.loss import Loss
from fivefold.engine.contract import Offloadable
from fivefold.roles.actor import Actor
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.roles.trained import TrainedRole
from fivefold.roles.trainer import Trainer
from fivefold.roles.trainer_worker import TrainerWorker, UpdateResult


class Critic(TrainedRole):
    """The critic's methods, each of which runs in all of its processes, inside a block `working`."""

    def __init__(
        self,
        trainer: Trainer,
        offloaded: Sequence[Offloadable] = (),
        actor: Actor | None = None,
        offloaded_by_actor: Sequence[Offloadable] = (),
    ) -> None:
        """Take the trainer's handle.

        Args:
            trainer: the handle.
            offloaded: what the critic moves off its devices while it does not work.
            actor: the actor, if it has devices of the critic.
            offloaded_by_actor: what the actor moves off them while the critic works.
        """
        super().__init__(trainer)
        self.offloaded = tuple(offloaded)
        self._actor = actor
        self._offloaded_by_actor = tuple(offloaded_by_actor)

    @contextmanager
    def working(self, *needed: Offloadable) -> Iterator[None]:
        """Give the critic, inside the block, the devices that it shares with the actor.

        Args:
            needed: what of the critic's state must be on the devices.
        """
        if self._actor is not None:
            self._actor.offload(self._offloaded_by_actor)
            self._actor.release()
        self.onload([kind for kind in self.offloaded if kind in needed])
        yield
        self.rest()
        if self._actor is not None:
            self._actor.onload(self._offloaded_by_actor)

    def rest(self) -> None:
        """Leave the devices to other roles."""
        self.offload(self.offloaded)
        if self.offloaded or self._actor is not None:
            self.release()

    def values(self, batch: RemoteBatch) -> tuple[Piece, ...]:
        """Compute the values of the states before the trained tokens, as the column `values`."""
        plan, arguments = self.trainer.deal(batch)
        return self.trainer.keep(TrainerWorker.compute_values, plan, arguments)[0]

    def advantages(
        self, batch: RemoteBatch, gae: GAE, kl: KLInReward | None
    ) -> tuple[tuple[Piece, ...], EstimateMoments]:
        """Estimate advantages and returns, as columns of these names; it needs nothing on the devices.

        Args:
            batch: its scalar `rewards` has the reward of each sequence; `values` and the columns that `kl` needs are in
                its pieces.
            gae: the constants of the estimate.
            kl: a penalty in the reward of each token; None: there is none.

        Returns:
            The columns, and the moments of all trained tokens' estimates.
        """
        plan, arguments = self.trainer.deal(batch, gae, kl)
        pieces, moments = self.trainer.keep(TrainerWorker.estimate_advantages, plan, arguments)
        return pieces, EstimateMoments.merged(moments)

    def update(self, batch: RemoteBatch, loss: Loss) -> UpdateResult:
        """Make one optimizer step on a mini-batch."""
        return self.trainer.update(batch, loss)
