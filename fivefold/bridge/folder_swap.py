"""Puts a finished folder in the place of an earlier one.

    .weights.partial-5f3a     the new folder, while it is written     ──┐ exchanged by one system call
    weights                   the earlier folder, or nothing          ──┘

Local file systems of Linux exchange two names at once, so `weights` is a whole folder at every instant. Others, such as
NFS, refuse that. There the earlier folder moves to `.weights.old` and the new one takes its place; whoever is killed
between these two steps leaves no `weights`, and the next `begin` moves the earlier folder back.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
from pathlib import Path

_AT_FDCWD = -100
"""Paths are relative to the working folder, as everywhere else."""
_RENAME_EXCHANGE = 2
_NOT_OFFERED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems and kernels answer that cannot exchange names."""


def begin(target: Path) -> Path:
    """Return a new, empty folder next to `target`, in which its successor is written.

    What saves that were killed have left is put right first: their partial folders are removed, and an earlier
    `target` that one of them had moved away is moved back.

    Raises:
        OSError: the folder cannot be made.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    old = _old(target)
    if old.exists() and not target.exists():
        old.rename(target)
    for leftover in (old, *_partials(target)):
        if leftover.exists():
            shutil.rmtree(leftover)
    # Another name each time: a node of a network file system may remember for a minute what a name meant, and the last
    # partial folder is the target now.
    partial = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir()
    return partial


def commit(partial: Path, target: Path) -> None:
    """Put `partial`, a folder of `begin`, in the place of `target`, and remove an earlier `target`.

    The files must be on the disk already. When this returns, so are the names.

    Raises:
        OSError: the folder cannot be put there; an earlier `target` is then as it was.
    """
    sync(partial)
    earlier = _put(partial, target)
    sync(target.parent)
    if earlier is not None:
        # The new folder is in place whatever happens here. What cannot be removed yet, such as a file on NFS that a
        # reader has open, is removed by the next `begin`.
        shutil.rmtree(earlier, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file's data, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put(partial: Path, target: Path) -> Path | None:
    """Move `partial` to `target`, and return where the earlier `target` is then."""
    if not target.exists():
        partial.rename(target)
        return None
    if _exchange(partial, target):
        return partial
    old = _old(target)
    target.rename(old)
    try:
        partial.rename(target)
    except OSError:
        old.rename(target)
        raise
    return old


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names at once; return False where that is not offered.

    Raises:
        OSError: it is offered, and failed.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # os.rename has no such flag
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_OFFERED:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def _partials(target: Path) -> list[Path]:
    """Return the partial folders of `target`, and of folders that were to be written into one of them."""
    hidden = [path for path in target.parent.iterdir() if path.name.startswith(".")]
    return [path for path in hidden if path.name.lstrip(".").startswith(f"{target.name.lstrip('.')}.partial-")]


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}.old")
