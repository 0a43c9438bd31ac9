"""The driver's handle of the model that is trained. Each of its processes holds a `TrainerWorker`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fivefold.algorithms.gae import Moments
from fivefold.cluster.group import Pending, Remote, WorkerGroup, put
from fivefold.engine.contract import Offloadable
from fivefold.roles.models import TrainedModel, Turn
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.roles.trainer import Trainer
from fivefold.roles.trainer_worker import BatchChange, TrainerWorker
from fivefold.weights.host_memory import THROUGH_HOST
from fivefold.weights.nccl_link import Invitation, Meeting
from fivefold.weights.offer import WeightOffer
from fivefold.weights.transport import Route


class Actor(TrainedModel):
    """The actor's methods, each of which runs in all of its processes."""

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

    def logprobs(self, batch: RemoteBatch, temperature: float) -> tuple[Piece, ...]:
        """Compute log-probs of the trained tokens under the current weights, as the column `old_logprobs`."""
        return self.trainer.logprobs(batch, "own", temperature, "old_logprobs")

    def energies(self, batch: RemoteBatch, temperature: float) -> tuple[Piece, ...]:
        """Compute the columns `old_logprobs` and `energies` (advantages/token_baseline.py) of the trained tokens."""
        return self.trainer.energies(batch, temperature)

    def advantage_moments(self, batch: RemoteBatch, change: BatchChange | None) -> Moments:
        """Return the moments of the advantages of all trained tokens, as they are after `change`."""
        return self.trainer.advantage_moments(batch, change)

    def sum_logprobs(self, batch: RemoteBatch) -> npt.NDArray[np.float64]:
        """Return the sum of each sequence's trained tokens' log-probs at temperature 1: float64 [N], in nats."""
        return self.trainer.sum_logprobs(batch, "own")

    def sum_values(self, batch: RemoteBatch) -> npt.NDArray[np.float64]:
        """Return, for each sequence, the sum of the values of the states before its trained tokens: float64 [N].

        The actor must have a value head.
        """
        return self.trainer.sum_values(batch)

    def offer_weights(self, version: int) -> WeightOffer:
        """Offer the current weights to a rollout; they are gathered while it reads them."""
        group = self.trainer.group
        if self._route.transport.carries_weights:
            return WeightOffer(version, self._streamed(self._route))
        items = self._announced(lambda: group.call(TrainerWorker.next_item, self._route))
        return WeightOffer(version, items, close=lambda: _free(group, self._route))

    def copy_weights(self, version: int) -> WeightOffer:
        """Return a copy of the current weights in host memory, which the actor may then change."""
        group = self.trainer.group
        if self._route.transport.carries_weights:
            # A replica that takes an item frees its memory: nothing else refers to it.
            items = deque(self._streamed(self._route))
            return WeightOffer(version, (items.popleft() for _ in range(len(items))))
        group.call(TrainerWorker.copy_weights, self._route)
        return WeightOffer(version, self._announced(lambda: group.control(TrainerWorker.next_copied, self._route)))

    def host_buckets(self) -> Iterator[Remote]:
        """Yield all weights in buckets in host memory, which are filled while they are read."""
        return self._streamed(replace(THROUGH_HOST, checksum=self._route.checksum))

    def open_link(self, meeting: Meeting) -> Invitation:
        """Open the store of an NCCL group with the rollout; return what the rollout needs to enter it."""
        [invitation, *_] = self.trainer.group.call(TrainerWorker.open_link, self._route, meeting)
        return invitation

    def enter_link(self) -> Pending[None]:
        """Enter the NCCL group, which waits for the rollout."""
        return self.trainer.group.start(TrainerWorker.enter_link, self._route)

    def _streamed(self, route: Route) -> Iterator[Remote]:
        """Yield the items of a transport that carries weights; the actor runs ahead of the reader."""
        return self.trainer.group.stream(TrainerWorker.stream_weights, route)

    def _announced(self, ask: Callable[[], Sequence[Any]]) -> Iterator[Remote]:
        """Yield items of all ranks. Each is made while the rollout loads the one before it.

        The reader asks for an item once the rollout has begun to load the last one, and so no longer reads the buffer
        that is filled next.
        """
        while (item := self._route.transport.merged(ask())) is not None:
            yield put(item)


def _free(group: WorkerGroup, route: Route) -> None:
    group.call(TrainerWorker.free_items, route)
