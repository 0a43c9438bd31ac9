"""A folder in the temporary directory for one process, which is removed when the process has ended.

    fivefold-x1y2z3/       readable by its user only
        in-use             locked for as long as the process that made the folder lives
        contents/          the files of the process; other programs may change its permissions

A process that is killed cannot remove its folder. Its lock is then released, so that the next process knows that the
folder is abandoned, even if their process ids mean nothing to each other, as in two containers with one temporary
directory.
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
    """File descriptor of the locked file. A process to which it is passed keeps the folder as well."""

    @classmethod
    def create(cls, parent: Path, prefix: str = PREFIX) -> Self:
        """Create a folder below `parent`, and remove the folders there that killed processes of this user have left.

        Args:
            parent: the folder in which to create it.
            prefix: beginning of its name; folders with names of other beginnings are not removed.
        """
        for abandoned in parent.glob(f"{prefix}*"):
            _remove_if_abandoned(abandoned)
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        # The lock file gets its name once it is locked, so that no process takes the folder for an abandoned one.
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
        """Yield the folder to write to, and remove it, unless the block fails: then the next process removes it."""
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
    """Return a folder for sockets, whose paths are limited to about 100 characters: a user's TMPDIR may be longer."""
    return Path("/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir())


def _remove_if_abandoned(path: Path) -> None:
    try:
        if not stat.S_ISDIR(path.lstat().st_mode) or path.lstat().st_uid != os.geteuid():
            return
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        # The folder is of another kind, or is being created, or another process has removed it.
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(path)
    except BlockingIOError:
        return
    finally:
        os.close(lock)


def _remove(path: Path) -> None:
    # A killed process may still have children that write here. If a file stays, the lock file must stay, too.
    shutil.rmtree(path / "contents", ignore_errors=True)
    if not (path / "contents").exists():
        shutil.rmtree(path, ignore_errors=True)
