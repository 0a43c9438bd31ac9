"""The driver's handle of the model that is trained. Each of its processes holds a `TrainerWorker`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fivefold.algorithms.gae import AdvantageMoments, Moments
from fivefold.cluster.group import Remote
from fivefold.engine.contract import Offloadable
from fivefold.roles.models import TrainedModel, Trainer, Turn
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.weight_sync import SendsWeights
from fivefold.weights.host_memory import THROUGH_HOST


class Actor(TrainedModel):
    """The actor's methods; each runs in all of its processes."""

    def __init__(
        self,
        trainer: Trainer,
        away: tuple[Offloadable, ...] = (),
        *,
        streams_frozen: bool = False,
        verifies: bool = False,
    ) -> None:
        """Take the processes.

        Args:
            trainer: the processes.
            away: what moves off the devices while a rollout that shares them is awake. The weights are added if the
                rollout's cache does not fit next to them.
            streams_frozen: whether weights that are not trained stay in host memory while they are sent to the rollout.
            verifies: whether weights have checksums where they are sent to a model that follows the actor.
        """
        super().__init__(trainer, Turn(away))
        self.streams_frozen = streams_frozen
        self._verifies = verifies

    def advantage_moments(self, batch: RemoteBatch, moments: AdvantageMoments) -> list[Moments]:
        """Return the moments of the advantages of all trained tokens, or of each data source's."""
        parts = self.trainer.compute(batch, moments)[1]
        return [Moments.merged(own) for own in zip(*parts, strict=True)]

    def host_buckets(self) -> Iterator[Remote]:
        """Yield all weights in buckets in host memory, which are filled while they are read."""
        return self.trainer.group.stream(SendsWeights.stream, replace(THROUGH_HOST, checksum=self._verifies))
