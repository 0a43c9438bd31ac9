"""The checkpoints of one run: which exist, how a new one is committed, and how old ones are deleted.

    begin(12)      checkpoints/step-000012/         no manifest: it does not count
                     trainer/..., run.json, ...     written and synced by the ranks and the driver
    commit(...)      manifest.json                  one atomic rename: from here on it is the latest
    prune(...)     the older ones lose their manifest, then their files

A process that ends at any moment, in each of these too, leaves whole checkpoints and folders without a manifest, which
the next `begin` removes.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from fivefold.checkpoints import manifest, run_state
from fivefold.checkpoints.manifest import Manifest
from fivefold.config.roles import ROLES
from fivefold.observe.durable import PART, sync_folder

RECIPE = "recipe.yaml"
"""File of a checkpoint with the resolved recipe."""
TRAINER = ROLES["actor"].state
"""Folder of a checkpoint with the actor's state."""
EXPERIENCE = "experience"
"""Folder of a checkpoint with the samples that wait for their step, in asynchronous training."""
REPLAY_BUFFER = "replay_buffer"
"""Folder of a checkpoint with the samples that may be trained again."""
MOST_NAMES = 5
"""Most files that a message lists."""
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, order=True)
class Checkpoint:
    """A committed checkpoint."""

    step: int
    """Number of training steps that are in it."""
    path: Path

    def manifest(self) -> Manifest:
        """Read the manifest.

        Raises:
            DamagedCheckpointError: it is damaged.
            NewerCheckpointError: a newer version of Fivefold has written it.
        """
        return manifest.read(self.path)


class CheckpointStore:
    """The checkpoints in one folder. One process at a time may write to it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def begin(self, step: int) -> Path:
        """Create an empty folder for the checkpoint of `step`, and delete what unfinished saves have left.

        Only one checkpoint may be in progress: finish or abandon it before the next `begin`.

        Raises:
            ValueError: there is a committed checkpoint of this step.
            OSError: the folder cannot be created.
        """
        path = self.path(step)
        if _is_committed(path):
            raise ValueError(f"{path} is a committed checkpoint, which is never written over")
        self.root.mkdir(parents=True, exist_ok=True)
        for folder in self._folders():
            if not _is_committed(folder):
                # Only this step's folder is in the way. What cannot be deleted of others yet, such as a file on NFS
                # that a reader has open, does not count and is left to a later save.
                shutil.rmtree(folder, ignore_errors=folder != path)
        path.mkdir()
        return path

    def commit(self, path: Path, content: Manifest) -> Checkpoint:
        """Make the folder `path` a checkpoint, with one atomic rename.

        The files that the manifest lists have been written and synced by the processes that wrote them.

        Raises:
            ValueError: a file that the manifest lists is missing or has another size, or one is there that it does not
                list.
            OSError: the manifest cannot be written; the error names the file.
        """
        problems = manifest.compare(path, content, deep=False)
        problems += [f"{file} is not in the manifest" for file in _unlisted(path, content)]
        if problems:
            lines = "".join(f"\n- {problem}" for problem in problems)
            raise ValueError(
                f"{path} is not complete, so it does not become a checkpoint; every process must write to the same "
                f"file system{lines}"
            )
        for folder in (*(inner for inner in path.rglob("*") if inner.is_dir()), path, self.root):
            sync_folder(folder)
        manifest.write(path, content)
        return Checkpoint(content.step, path)

    def all(self) -> list[Checkpoint]:
        """Return the committed checkpoints, the oldest step first; a folder without a manifest is none."""
        return sorted(
            Checkpoint(int(match[1]), folder)
            for folder in self._folders()
            if (match := _NAME.fullmatch(folder.name)) and _is_committed(folder)
        )

    def latest(self) -> Checkpoint | None:
        """Return the committed checkpoint of the highest step; None if there is none."""
        return max(self.all(), default=None)

    def prune(self, keep: int, protected: Collection[int] = ()) -> list[int]:
        """Delete all checkpoints except the newest `keep` and the steps `protected`. Returns the deleted steps.

        Call it after the newest is committed, never before.
        """
        checkpoints = self.all()
        old = [each for each in checkpoints[: max(len(checkpoints) - keep, 0)] if each.step not in protected]
        for checkpoint in old:
            delete(checkpoint.path)
        return [checkpoint.step for checkpoint in old]

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of `step`, whether there is one or not."""
        return self.root / f"step-{step:06d}"

    def _folders(self) -> list[Path]:
        """Return the folders that have the name of a checkpoint, in no order."""
        if not self.root.is_dir():
            return []
        return [folder for folder in self.root.iterdir() if _NAME.fullmatch(folder.name) and folder.is_dir()]


def checkpoint_in(folder: Path) -> Checkpoint | None:
    """Return the committed checkpoint that `folder` is, None if it is none.

    Raises:
        DamagedCheckpointError: its manifest is damaged.
        NewerCheckpointError: a newer version of Fivefold has written it.
    """
    return Checkpoint(manifest.read(folder).step, folder) if _is_committed(folder) else None


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint: the manifest first, so that what is left of it after an interruption does not count."""
    (checkpoint / manifest.FILE).unlink(missing_ok=True)
    sync_folder(checkpoint)
    shutil.rmtree(checkpoint)


def what_is_in(folder: Path) -> str:
    """Return what a folder without a checkpoint holds instead, in words."""
    if (folder / run_state.FILE).is_file() or (folder / TRAINER).is_dir():
        return f"it is one that was not finished, for {manifest.FILE}, which is written last, is missing"
    if (folder / "config.json").is_file():
        return "it is a model in Hugging Face format, which belongs to actor.path"
    names = sorted(path.name for path in folder.iterdir())
    return f"it holds {', '.join(first_few(names))}" if names else "it is empty"


def first_few(lines: list[str]) -> list[str]:
    """Return the first few of many lines, and how many more there are."""
    more = len(lines) - MOST_NAMES
    return [*lines[:MOST_NAMES], *([f"and {more} more"] if more > 0 else [])]


def _is_committed(folder: Path) -> bool:
    return (folder / manifest.FILE).is_file()


def _unlisted(folder: Path, content: Manifest) -> list[Path]:
    """Return the files in `folder` that the manifest does not list; what a failed `manifest.write` left is none."""
    listed = {folder / name for name in (*content.files, manifest.FILE, manifest.FILE + PART)}
    return sorted(path for path in folder.rglob("*") if path.is_file() and path not in listed)
