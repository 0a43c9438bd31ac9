"""Files that are on the disk, and not only in memory, once they are written.

    replacing   part file ─> fsync ─> rename ─> fsync of the folder

Python leaves the path out of some errors, such as a full disk. Here every error names its file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PART = ".part"
"""Suffix of a file while it is written."""


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` at the end of the block. Readers see the old file or the new one.

    Raises:
        OSError: it cannot be written; the error names `path`, and an earlier file is unchanged.
    """
    part = path.with_name(path.name + PART)
    with naming(path):
        try:
            with part.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)  # it exists only if writing failed
        sync_folder(path.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write `content` to `path`, replacing an earlier file.

    Raises:
        OSError: as `replacing`.
    """
    with replacing(path) as file:
        file.write(content)


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


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name `path` in an OSError of the block that names no file."""
    try:
        yield
    except OSError as error:
        name_file(error, path)
        raise


def name_file(error: OSError, path: Path) -> None:
    """Name `path` in an error that names no file."""
    if error.filename is None and error.errno is not None:
        error.filename = str(path)
