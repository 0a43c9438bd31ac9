"""Files that are on the disk, and not only in the machine's memory, when a function returns.

    write      part file ─> fsync ─> rename ─> fsync of the folder

Python leaves the path out of errors such as a full disk; here every error names its file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from xxhash import xxh3_128

BLOCK_BYTES = 4 * 2**20
"""Bytes of a file that are read at one time to compute its digest."""
PART = ".part"
"""Suffix of a file that is being written."""


def write_file(path: Path, content: bytes) -> None:
    """Write `content` to `path`, in place of an earlier file: a reader sees the old file or the new one, never a part.

    Raises:
        OSError: it cannot be written; the error names `path`, and an earlier file is as it was.
    """
    part = path.with_name(path.name + PART)
    with naming(path):
        try:
            with part.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)  # there is one only if the file could not be written
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names of the files in `folder` are on the disk.

    Raises:
        OSError: the disk reports an error; it names `folder`.
    """
    with naming(folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def digest(path: Path, on_bytes: Callable[[int], None] = lambda count: None) -> str:
    """Return the xxh3_128 digest of a file's content, in hexadecimal.

    Args:
        path: the file.
        on_bytes: called with the number of bytes of each block that was read.

    Raises:
        OSError: it cannot be read; the error names `path`.
    """
    hasher = xxh3_128()
    with naming(path), path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            hasher.update(block)
            on_bytes(len(block))
    return hasher.hexdigest()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError of the body that names no file name `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
