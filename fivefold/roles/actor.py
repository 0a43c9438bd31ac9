"""The driver's handle of the model that is trained. Each of its processes holds a `TrainerWorker`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from fivefold.algorithms.gae import AdvantageMoments, Moments
from fivefold.cluster.group import Pending, Remote, WorkerGroup, put
from fivefold.engine.contract import Offloadable
from fivefold.roles.models import TrainedModel, Turn
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.trainer import Trainer
from fivefold.roles.trainer_worker import BatchChange
from fivefold.roles.weight_sending import SendsWeights
from fivefold.weights.host_memory import THROUGH_HOST
from fivefold.weights.nccl_link import Invitation, Meeting
from fivefold.weights.offer import WeightOffer
from fivefold.weights.transport import Route


class Actor(TrainedModel):
    """The actor's methods; each runs in all of its processes."""

    def __init__(self, trainer: Trainer, route: Route = THROUGH_HOST, away: tuple[Offloadable, ...] = ()) -> None:
        """Take the processes.

        Args:
            trainer: the processes.
            route: the way of the weights to the rollout.
            away: what moves off the devices while a rollout that shares them is awake. The weights are added if the
                rollout's cache does not fit next to them.
        """
        super().__init__(trainer, Turn(away))
        self._route = route

    @property
    def sends_by_nccl(self) -> bool:
        """Whether weights go to the rollout over an NCCL group."""
        return self._route.transport.is_collective

    def advantage_moments(self, batch: RemoteBatch, change: BatchChange) -> Moments:
        """Return the moments of the advantages of all trained tokens, as they are after `change`."""
        return Moments.merged(self.trainer.compute(batch, AdvantageMoments(change))[1])

    def offer_weights(self, version: int) -> WeightOffer:
        """Offer the current weights to a rollout; they are gathered while it reads them."""
        group = self.trainer.group
        if self._route.transport.carries_weights:
            return WeightOffer(version, self._streamed(self._route))
        items = self._announced(lambda: group.call(SendsWeights.next_item, self._route))
        return WeightOffer(version, items, close=lambda: _free(group, self._route))

    def copy_weights(self, version: int) -> WeightOffer:
        """Return a copy of the current weights in host memory, which the actor may then change."""
        group = self.trainer.group
        if self._route.transport.carries_weights:
            # A replica that takes an item frees its memory: nothing else refers to it.
            items = deque(self._streamed(self._route))
            return WeightOffer(version, (items.popleft() for _ in range(len(items))))
        group.call(SendsWeights.copy_weights, self._route)
        return WeightOffer(version, self._announced(lambda: group.control(SendsWeights.next_copied, self._route)))

    def host_buckets(self) -> Iterator[Remote]:
        """Yield all weights in buckets in host memory, which are filled while they are read."""
        return self._streamed(replace(THROUGH_HOST, checksum=self._route.checksum))

    def open_link(self, meeting: Meeting) -> Invitation:
        """Open the store of an NCCL group with the rollout; return what the rollout needs to enter it."""
        [invitation, *_] = self.trainer.group.call(SendsWeights.open_link, self._route, meeting)
        return invitation

    def enter_link(self) -> Pending[None]:
        """Enter the NCCL group, which waits for the rollout."""
        return self.trainer.group.start(SendsWeights.enter_link, self._route)

    def _streamed(self, route: Route) -> Iterator[Remote]:
        """Yield the items of a transport that carries weights; the actor runs ahead of the reader."""
        return self.trainer.group.stream(SendsWeights.stream_weights, route)

    def _announced(self, ask: Callable[[], Sequence[Any]]) -> Iterator[Remote]:
        """Yield items of all ranks. Each is made while the rollout loads the one before it.

        The reader asks for an item once the rollout has begun to load the last one, and so no longer reads the buffer
        that is filled next.
        """
        while (item := self._route.transport.merged(ask())) is not None:
            yield put(item)


def _free(group: WorkerGroup, route: Route) -> None:
    group.call(SendsWeights.free_items, route)
