"""A temporary folder for one process, which is removed after the process has ended.

    fivefold-x1y2z3/       readable by its user only
        in-use             locked while the process that created the folder is alive
        contents/          the files of the process; other programs may change its permissions

A killed process cannot remove its folder, but its lock is released, so the next process knows that the folder is
abandoned. This works even between containers that share a temporary directory but not their process ids.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

PREFIX = "fivefold-"
_LOCK = "in-use"


@dataclass(frozen=True)
class PrivateFolder:
    """The folder of this process."""

    path: Path
    lock: int
    """File descriptor of the locked file. A process that inherits it keeps the folder, too."""

    @classmethod
    def create(cls, parent: Path, prefix: str = PREFIX) -> Self:
        """Create a folder in `parent`, and remove folders that killed processes of this user have left there.

        Args:
            parent: the folder in which to create it.
            prefix: prefix of its name. Only folders with this prefix are removed.
        """
        for abandoned in parent.glob(f"{prefix}*"):
            _remove_if_abandoned(abandoned)
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # The lock file gets its name once it is locked, so that no process considers the folder abandoned.
        unlocked = path / f"{_LOCK}-soon"
        lock = os.open(unlocked, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        unlocked.rename(path / _LOCK)
        (path / "contents").mkdir()
        return cls(path, lock)

    @property
    def contents(self) -> Path:
        """The folder to write to."""
        return self.path / "contents"

    @contextmanager
    def until_it_fails(self) -> Iterator[Path]:
        """Yield the folder to write to, and remove it afterwards. If the block fails, the next process removes it."""
        try:
            yield self.contents
        except BaseException:
            os.close(self.lock)
            raise
        self.remove()

    def remove(self) -> None:
        """Remove the folder and its files."""
        _remove(self.path)
        os.close(self.lock)


def short_folder() -> Path:
    """Return a folder for sockets, whose paths are limited to about 100 characters. A user's TMPDIR may be longer."""
    return Path("/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir())


def _remove_if_abandoned(path: Path) -> None:
    try:
        if not stat.S_ISDIR(path.lstat().st_mode) or path.lstat().st_uid != os.geteuid():
            return
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        # Another kind of folder, or one that is being created or has just been removed.
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    except BlockingIOError:
        return
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    # Children of a killed process may still write here. If a file stays, the lock file must stay, too.
    shutil.rmtree(path / "contents", ignore_errors=True)
    if not (path / "contents").exists():
        shutil.rmtree(path, ignore_errors=True)
