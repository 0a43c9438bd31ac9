"""The driver's handle of the model that is trained. Each of its processes holds a `TrainerWorker`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.algorithms.advantages import KLInReward
from fivefold.algorithms.loss import Loss
from fivefold.cluster.group import Pending, Remote, WorkerGroup, put
from fivefold.engine.contract import Offloadable
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.roles.trainer import Trainer, TrainerWorker, UpdateResult, WriteFailed
from fivefold.sync.device_buckets import merged
from fivefold.sync.nccl_link import Invitation, Meeting
from fivefold.sync.offer import WeightOffer
from fivefold.sync.transport import FOLDER, Route

if TYPE_CHECKING:
    from fivefold.engine.state_store import WrittenPart


class Actor:
    """The actor's methods, each of which runs in all of its processes."""

    def __init__(self, trainer: Trainer, route: Route = FOLDER) -> None:
        """Take the trainer's handle, and the way of its weights to the rollout."""
        self._trainer = trainer
        self._route = route

    def logprobs(self, batch: RemoteBatch, temperature: float) -> tuple[Piece, ...]:
        """Compute log-probs of the trained tokens under the current weights, as the column `old_logprobs`."""
        return self._trainer.logprobs(batch, "own", temperature, "old_logprobs")

    def sum_logprobs(self, batch: RemoteBatch) -> float:
        """Return the sum of the log-probs of all trained tokens, at temperature 1."""
        return self._trainer.sum_logprobs(batch)

    def update(self, batch: RemoteBatch, loss: Loss, kl: KLInReward | None = None) -> UpdateResult:
        """Make one optimizer step on a mini-batch; `kl` is subtracted from its advantages first."""
        _, arguments = self._trainer.deal(batch, loss, kl)
        return self._trainer.group.call_each(TrainerWorker.update, arguments)[0]

    def offer_weights(self, version: int) -> WeightOffer:
        """Offer the current weights to a rollout; they are gathered while it reads them."""
        group = self._trainer.group
        if self._route.transport == "folder":
            buckets = group.stream(TrainerWorker.offer_weights, self._route.checksum)
            return WeightOffer(version, buckets)
        return WeightOffer(version, self._device_buckets(), close=lambda: _free(group))

    def _device_buckets(self) -> Iterator[Remote]:
        """Yield announcements of buckets. A bucket is filled while the rollout loads the one before it.

        The reader asks for a bucket once the rollout has begun to load the last one, and so has done with the buffer
        that is filled next.
        """
        while (bucket := merged(self._trainer.group.call(TrainerWorker.next_bucket, self._route))) is not None:
            yield put(bucket)

    def open_link(self, meeting: Meeting) -> Invitation:
        """Open the store of an NCCL group with the rollout; return what the rollout needs to enter it."""
        [invitation, *_] = self._trainer.group.call(TrainerWorker.open_link, meeting, self._route.n_receivers)
        assert invitation is not None
        return invitation

    def enter_link(self) -> Pending[None]:
        """Enter the NCCL group, which waits for the rollout."""
        return self._trainer.group.start(TrainerWorker.enter_link)

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""
        self._trainer.group.call_first(TrainerWorker.save, folder)

    def snapshot(self, folder: Path) -> int:
        """Copy the training state to host memory, for `write_snapshot`. Returns the bytes of all ranks."""
        return sum(self._trainer.group.call(TrainerWorker.snapshot, folder))

    def write_snapshot(self) -> list[WrittenPart]:
        """Write the files of the last snapshot, beside whatever the processes do. Returns what each rank wrote.

        Raises:
            OSError: some rank could not write.
        """
        results = self._trainer.group.control(TrainerWorker.write_snapshot)
        failures = [result for result in results if isinstance(result, WriteFailed)]
        if failures:
            first = failures[0]
            raise OSError(f"{first.reason} (actor rank {first.rank} on {first.host})")
        return [result for result in results if not isinstance(result, WriteFailed)]

    def load_state(self, folder: Path) -> None:
        """Load the training state that was written below `folder`, on this layout or any other."""
        self._trainer.group.call(TrainerWorker.load_state, folder)

    def offload(self, what: Sequence[Offloadable]) -> int:
        """Move state off the devices. Returns the bytes that were freed, of the rank with the most."""
        return max(self._trainer.group.call(TrainerWorker.offload, what)) if what else 0

    def onload(self, what: Sequence[Offloadable]) -> int:
        """Bring back what `offload` moved; what is on the devices stays there.

        Returns:
            The bytes that were allocated, of the rank with the most.
        """
        return max(self._trainer.group.call(TrainerWorker.onload, what)) if what else 0

    def release(self) -> None:
        """Release cached device memory, for a role that shares the devices."""
        self._trainer.release()


def _free(group: WorkerGroup) -> None:
    group.call(TrainerWorker.free_buckets)
