"""The driver's handle of the model that is trained. Each of its processes holds a `TrainerWorker`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.algorithms.advantages import KLInReward
from fivefold.algorithms.loss import Loss
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.roles.trainer import Trainer, TrainerWorker, UpdateResult, WriteFailed
from fivefold.sync.offer import WeightOffer

if TYPE_CHECKING:
    from fivefold.engine.state_store import WrittenPart


class Actor:
    """The actor's methods, each of which runs in all of its processes."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

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
        return WeightOffer(version, self._trainer.group.stream(TrainerWorker.offer_weights))

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

    def release(self) -> None:
        """Release cached device memory, for a role that shares the devices."""
        self._trainer.release()
