"""The driver's handle of a model that is trained, as far as the actor and the critic have it in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fivefold.cluster.group import WorkerGroup
from fivefold.config.schema.run import ProfileConfig
from fivefold.engine.contract import Offloadable
from fivefold.roles.moved_bytes import MovedBytes
from fivefold.roles.trainer import Trainer
from fivefold.roles.trainer_worker import TrainerWorker, WriteFailed

if TYPE_CHECKING:
    from fivefold.engine.state.state_store import WrittenPart

Result = TypeVar("Result")


class TrainedRole:
    """Methods that save, load and move a model's state, each of which runs in all of its processes."""

    def __init__(self, trainer: Trainer) -> None:
        """Take the trainer's handle."""
        self.trainer = trainer
        self.moved = MovedBytes()
        """What was moved off the devices and back since the counts were taken."""

    def effective_config(self) -> dict[str, Any]:
        """Return the whole configuration of the library that the model runs on."""
        return self.trainer.group.call_first(TrainerWorker.effective_config)

    def device_names(self) -> list[str | None]:
        """Return the name of each process's GPU; None for a CPU process."""
        return self.trainer.group.call(TrainerWorker.device_name)

    def start_profile(self, config: ProfileConfig) -> None:
        """Begin to record what some of the processes do."""
        self.trainer.group.call(TrainerWorker.start_profile, config)

    def write_profile(self, folder: Path) -> None:
        """Write what they have recorded."""
        self.trainer.group.call(TrainerWorker.write_profile, folder)

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""
        self.trainer.group.call_first(TrainerWorker.save, folder)

    def snapshot(self, folder: Path) -> None:
        """Copy the training state to host memory, for `write_snapshot`.

        Raises:
            OSError: the state is written at once (`TrainerSpec.copies_state`), and some rank could not write.
        """
        group = self.trainer.group
        written(group, group.call(TrainerWorker.snapshot, folder))

    def write_snapshot(self) -> list[WrittenPart]:
        """Write the files of the last snapshot, beside whatever the processes do. Returns what each rank wrote.

        Raises:
            OSError: some rank could not write.
        """
        group = self.trainer.group
        return written(group, group.control(TrainerWorker.write_snapshot))

    def load_state(self, folder: Path) -> None:
        """Load the training state that was written below `folder`, on this layout or any other."""
        self.trainer.group.call(TrainerWorker.load_state, folder)

    def offload(self, what: Sequence[Offloadable]) -> None:
        """Move state off the devices."""
        if what:
            self.moved.freed += max(self.trainer.group.call(TrainerWorker.offload, what))

    def onload(self, what: Sequence[Offloadable]) -> None:
        """Bring back what `offload` moved; what is on the devices stays there."""
        if what:
            self.moved.restored += max(self.trainer.group.call(TrainerWorker.onload, what))

    def release(self) -> None:
        """Release cached device memory, for a role that shares the devices."""
        self.trainer.release()

    def free_memory(self) -> int | None:
        """Return the bytes that are free on the fullest of the devices, whoever has the others; None: no GPUs."""
        return min(
            (free for free in self.trainer.group.call(TrainerWorker.free_memory) if free is not None), default=None
        )


def written(group: WorkerGroup, results: Sequence[Result | WriteFailed]) -> list[Result]:
    """Return the result of each rank of a group, all of which could write.

    Raises:
        OSError: some rank could not write.
    """
    failures = [result for result in results if isinstance(result, WriteFailed)]
    if failures:
        first = failures[0]
        raise OSError(f"{first.reason} ({group.name} rank {first.rank} on {first.host})")
    return [result for result in results if not isinstance(result, WriteFailed)]
