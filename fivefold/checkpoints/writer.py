"""Writes a checkpoint: the ranks' copies of their state, the driver's part, and the manifest that makes it count.

    copy     the ranks copy their state to host memory, or write it                training waits
    write    the ranks write and sync their files ─> .metadata, run.json, recipe.yaml ─> manifest.json
             ─> old checkpoints are deleted                                         in the background

A write that fails is repeated, `recover.write_attempts` times in all; then the run ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from fivefold.checkpoints.manifest import FileEntry, Manifest
from fivefold.checkpoints.run_state import RunState
from fivefold.checkpoints.store import RECIPE, CheckpointStore
from fivefold.config.load import resolved_yaml
from fivefold.config.schema.run import RunConfig
from fivefold.observe.durable import write_file
from fivefold.observe.errors import RunFailed
from fivefold.observe.timers import PhaseTimers

if TYPE_CHECKING:
    from fivefold.engine.state.dcp_files import WrittenFile, WrittenPart

Result = TypeVar("Result")


class StateOwner(Protocol):
    """A role whose state is in a checkpoint."""

    def snapshot(self, folder: Path) -> None:
        """Copy the state to host memory, for `write_snapshot` to write it below `folder`.

        Where no copy is made, it is written at once, or kept as it is if it never changes.

        Raises:
            OSError: some rank could not write.
        """

    def write_snapshot(self) -> Sequence[WrittenPart]:
        """Write the last snapshot, from any thread; may be repeated. Returns what each rank wrote.

        Raises:
            OSError: some rank could not write.
        """


@dataclass(frozen=True)
class Begun:
    """A checkpoint whose state has been copied."""

    folder: Path
    state: RunState
    saved: str
    seconds: float
    """Time that the copy took."""


@dataclass
class CheckpointWriter:
    """Copies the state of a run and writes it."""

    recipe: RunConfig
    """The recipe, whose section `recover` is followed, and which is saved with each checkpoint."""
    store: CheckpointStore
    """The run's checkpoints."""
    owners: Mapping[str, StateOwner]
    """Whose state is saved, by the folder of a checkpoint that gets it."""
    timers: PhaseTimers
    """Timers of the driver; writing counts for the phase `checkpoint write`."""
    note: Callable[[str], None]
    """Shows a line of text to the user."""
    is_ours: Callable[[], bool]
    """Tells whether the run's folder still belongs to this process; without it, nothing is committed."""
    longest_write: float = 0.0
    """Longest time, in seconds, that a checkpoint took to be copied and written."""

    def copy(self, step: int) -> Path:
        """Copy the ranks' state after `step`. Returns the folder of the checkpoint.

        Raises:
            RunFailed: no attempt succeeded.
        """
        return self._attempted(step, lambda: self._snapshot(step))

    def write(self, begun: Begun) -> None:
        """Write and commit a checkpoint.

        Raises:
            RunFailed: no attempt succeeded, or another process has the run's folder.
        """
        began = time.monotonic()
        with self.timers.phase("checkpoint write"):
            files = self._attempted(begun.state.step, lambda: self._files(begun))
            content = Manifest(begun.state.step, begun.saved, begun.state.fingerprints.config, files)
            self._attempted(begun.state.step, lambda: self._commit(begun.folder, content))
            self._prune(begun.state)
        self.longest_write = max(self.longest_write, begun.seconds + time.monotonic() - began)

    def _snapshot(self, step: int) -> Path:
        folder = self.store.begin(step)
        # All folders come first: an owner that has copied its state makes no second copy before the first is written,
        # so nothing after a copy may fail and be attempted again.
        for name in self.owners:
            (folder / name).mkdir()
        for name, owner in self.owners.items():
            owner.snapshot(folder / name)
        return folder

    def _prune(self, state: RunState) -> None:
        """Delete old checkpoints. One that cannot be deleted ends no run, because the newest one is on the disk."""
        history = state.kept_metric
        best = None if history is None else history.best([each.step for each in self.store.all()])
        try:
            self.store.prune(self.recipe.recover.max_to_keep, () if best is None else (best,))
        except OSError as error:
            self.note(f"an old checkpoint could not be deleted, which the next save attempts again: {error}")

    def _commit(self, folder: Path, content: Manifest) -> None:
        """Make the checkpoint count.

        Raises:
            RunFailed: another process has the run's folder.
        """
        if not self.is_ours():
            raise RunFailed(
                f"the checkpoint of step {content.step} is not committed: another process has taken over the run's "
                f"folder, {self.store.root.parent}, or has removed it. This process ends, so that there is one run"
            )
        self.store.commit(folder, content)

    def _files(self, begun: Begun) -> dict[str, FileEntry]:
        """Write all files but the manifest. Returns their entries."""
        # Imported here: torch.distributed.checkpoint takes half a second, which a driver without checkpoints saves.
        from fivefold.engine.state.dcp_files import finish

        files: dict[str, FileEntry] = {}
        for name, owner in self.owners.items():
            written = finish(begun.folder / name, owner.write_snapshot())
            files |= {f"{name}/{file.name}": _entry(file) for file in written}
        write_file(begun.folder / RECIPE, resolved_yaml(self.recipe).encode())
        for path in (begun.folder / RECIPE, begun.state.write(begun.folder)):
            files[path.name] = FileEntry.of(path)
        return files

    def _attempted(self, step: int, action: Callable[[], Result]) -> Result:
        """Return what `action` returns; it is repeated after an OSError.

        Raises:
            RunFailed: the last attempt failed too.
        """
        attempts = self.recipe.recover.write_attempts
        for attempt in range(1, attempts + 1):
            try:
                return action()
            except OSError as error:
                failure = error
                self.note(f"the checkpoint of step {step} could not be written ({attempt}. attempt): {error}")
        latest = self.store.latest()
        left = "there is no earlier one" if latest is None else f"the last whole one is {latest.path}"
        raise RunFailed(
            f"the checkpoint of step {step} could not be written to {self.store.path(step)} in "
            f"{attempts} attempts (recover.write_attempts): {failure}. {left[0].upper()}{left[1:]}. "
            "Mend the cause, such as a full disk, and run the same command again"
        ) from failure


def _entry(file: WrittenFile) -> FileEntry:
    return FileEntry(file.n_bytes, file.xxh3_128)
