"""Files that are on the disk, and not only in the machine's memory, once they are written.

    replacing   part file ─> fsync ─> rename ─> fsync of the folder

Python leaves the path out of errors such as a full disk; here every error names its file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PART = ".part"
"""Suffix of a file that is being written."""


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of `path` at the end of the block: a reader sees the old one or the new one.

    Raises:
        OSError: it cannot be written; the error names `path`, and an earlier file is as it was.
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
            part.unlink(missing_ok=True)  # it is there only if the file could not be written
        sync_folder(path.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write `content` to `path`, in place of an earlier file.

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
    """Let an OSError of the body that names no file name `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
