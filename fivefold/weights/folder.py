"""Passes weights to servers as a model folder in memory, which all replicas of a node read.

One replica of a node writes the files, and links to each file for every other replica. Each replica removes its own
links once its server has read them, and the last one frees the memory.

    /dev/shm/fivefold-weights-<run>/<version>/     written, and locked, by the node's replica 0; only its user may enter
        0/model-00001-of-00002.safetensors         the same file ...
        1/model-00001-of-00002.safetensors         ... under another name
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

PREFIX = "fivefold-weights-"
POLL_S = 0.01
"""Seconds between checks for the files of another replica."""
SHARED_MEMORY = Path("/dev/shm")
SPARE = 1.05
"""Room that must be free, as a multiple of the weights: files have headers, and other processes write there too."""

Save = Callable[[Path, Iterable[tuple[str, Tensor]]], None]
"""Writes tensors as a Hugging Face folder; a folder that exists is complete."""


@dataclass(frozen=True)
class NodePlace:
    """One replica among its role's on the same node."""

    run: str
    """Identifier of the run on this node. It differs from other runs' and from this run's on other nodes, which may be
    containers on one machine, with one memory."""
    index: int
    """Index of the replica, from 0."""
    count: int
    """Number of replicas on the node."""


class WeightFolder:
    """The folder in which a replica finds the weights of an update."""

    def __init__(self, place: NodePlace, save: Save, n_bytes: int) -> None:
        """Choose the place of the files, and remove what killed runs have left there.

        Args:
            place: the replica; replica 0 of a node writes the files.
            save: writes the files.
            n_bytes: size of all weights.

        Raises:
            ValueError: there is no room for the weights.
        """
        self._place = place
        self._save = save
        self._lock: int | None = None
        if place.index == 0:
            self._parent = _roomy_folder(n_bytes)
            _remove_abandoned(self._parent)

    @contextmanager
    def holding(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Iterator[Path]:
        """Yield the folder with `weights`, which exists during the block. Every replica of the node must call this."""
        if self._place.index == 0:
            self._write(weights, version)
        else:
            for _ in weights:
                pass
        own = self._wait(version)
        try:
            yield own
        finally:
            shutil.rmtree(own)
            for folder in own.parents[:2]:
                with suppress(OSError):  # the folder still has the links of other replicas
                    folder.rmdir()

    def _write(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        root = self._parent / f"{PREFIX}{self._place.run}"
        partial = root / "partial"
        self._hold(root, partial)
        try:
            self._save(partial / "0", weights)
            for index in range(1, self._place.count):
                shutil.copytree(partial / "0", partial / str(index), copy_function=os.link)
            partial.rename(root / str(version))
        except BaseException:
            shutil.rmtree(root)
            raise

    def _hold(self, root: Path, partial: Path) -> None:
        """Make `partial` in `root`, and lock `root` until this process ends or begins the next update."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            os.close(lock)
        while self._lock is None:
            # A new run takes the folder for abandoned until it is locked, and may remove it at any point before that.
            # Once it is locked, `partial` keeps the run's other replicas from removing it as empty.
            with suppress(FileNotFoundError):
                root.mkdir(mode=0o700, exist_ok=True)
                _check_private(root)
                partial.mkdir(exist_ok=True)
                self._lock = _locked(root, fcntl.LOCK_EX)

    def _wait(self, version: int) -> Path:
        """Wait for the folder with this replica's links. A writer that fails ends the run, and with it this process."""
        place = f"{PREFIX}{self._place.run}/{version}/{self._place.index}"
        while not (found := [folder / place for folder in _folders() if (folder / place).is_dir()]):
            time.sleep(POLL_S)
        _check_private(found[0].parents[1])
        return found[0]


def _check_private(root: Path) -> None:
    """Refuse a folder into which another user could put weights: its name is known, and its parent is everybody's.

    Raises:
        RuntimeError: it is not this user's, or others may enter it.
        FileNotFoundError: there is no such folder.
    """
    found = root.lstat()
    if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode) or stat.S_IMODE(found.st_mode) & 0o077:
        raise RuntimeError(
            f"{root} was made by another user (uid {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}), who could "
            "replace the weights of this run in it: remove it, and look who made it"
        )


def _folders() -> list[Path]:
    """Return shared memory, and the temporary folder for containers that have little shared memory."""
    return [folder for folder in (SHARED_MEMORY, Path(tempfile.gettempdir())) if folder.is_dir()]


def _roomy_folder(n_bytes: int) -> Path:
    for folder in _folders():
        if shutil.disk_usage(folder).free > SPARE * n_bytes:
            return folder
    raise ValueError(
        f"an update of the rollout's weights passes through {n_bytes / 1e9:.1f} GB of files, for which there is no "
        f"room in {' or '.join(map(str, _folders()))}: enlarge /dev/shm (docker run --shm-size), or set TMPDIR"
    )


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of this user's runs that were killed during an update; their locks ended with them."""
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            lock = _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, FileNotFoundError, PermissionError):
            # The folder's run is in progress, or another new run has removed it meanwhile, or it is another user's.
            continue
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _locked(folder: Path, operation: int) -> int | None:
    """Lock a folder; return the file descriptor that has the lock, or None if another folder has taken its place.

    Raises:
        FileNotFoundError: there is no such folder, or it was removed before it was locked.
        BlockingIOError: another process has the lock, and `operation` does not wait.
    """
    lock = os.open(folder, os.O_RDONLY)
    is_locked = False
    try:
        fcntl.flock(lock, operation)
        is_locked = os.path.samestat(os.fstat(lock), folder.stat())
    finally:
        if not is_locked:
            os.close(lock)
    return lock if is_locked else None
