"""The manifest of a checkpoint: its files with their sizes and digests. A folder without a manifest is no checkpoint.

    {"format": 2, "step": 12, "saved": "2026-05-04T10:00:00+00:00", "model": "9f2c...",
     "files": {"run.json": {"bytes": 1843, "xxh3_128": "01c4..."}, "trainer/__0_0.distcp": {...}, ...},
     "xxh3_128": "77ab..."}

The last digest is of the manifest itself, without it. The manifest is written after all other files, so a process
that ends at any moment leaves either a whole checkpoint or a folder that does not count.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from pydantic import TypeAdapter
from xxhash import xxh3_128, xxh3_128_hexdigest

from fivefold.json_text import read_json
from fivefold.observe.durable import naming, write_file

FILE = "manifest.json"
FORMAT = 2
"""Version of the format of checkpoints; it is raised whenever an older Fivefold could not read a new checkpoint."""
DIGEST = "xxh3_128"
BLOCK_BYTES = 4 * 2**20
"""Bytes of a file that are read at one time to compute its digest."""
READERS = 8
"""Files that are read at one time to compute their digests."""


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint as it was written."""

    bytes: int
    xxh3_128: str
    """Digest of the content, in hexadecimal."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read the file at `path`."""
        return cls(path.stat().st_size, digest(path))


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    step: int
    """Number of training steps that are in it."""
    saved: str
    """Time at which the state was taken, ISO 8601 in UTC."""
    model: str
    """Fingerprint of the model's configuration (`fingerprints.py`)."""
    files: Mapping[str, FileEntry]
    """All files but the manifest, by their path relative to the checkpoint's folder, with `/`."""
    format: int = FORMAT

    @property
    def n_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(entry.bytes for entry in self.files.values())


class DamagedCheckpointError(ValueError):
    """A checkpoint with files that are missing or not as they were written; the message names them."""


class NewerCheckpointError(ValueError):
    """A checkpoint that a newer version of Fivefold has written."""


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of the checkpoint in `folder`, which makes it one.

    Raises:
        OSError: it cannot be written; the error names the file.
    """
    values = asdict(manifest)
    write_file(folder / FILE, _text(values | {DIGEST: _own_digest(values)}).encode())


def read(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in `folder`.

    Raises:
        DamagedCheckpointError: there is none, or it is damaged.
        NewerCheckpointError: a newer version of Fivefold has written it.
    """
    file = folder / FILE
    try:
        values = read_json(file)
    except FileNotFoundError:
        raise DamagedCheckpointError(
            f"{file} does not exist: it is written last, so {folder} holds no complete checkpoint"
        ) from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise DamagedCheckpointError(f"{file} is damaged: it is not JSON ({error})") from error
    found = values.pop(DIGEST, None) if isinstance(values, dict) else None
    if found is None or found != _own_digest(values):
        raise DamagedCheckpointError(f"{file} is damaged: its own checksum does not agree with its content")
    written = values.get("format")
    if isinstance(written, int) and written > FORMAT:
        raise NewerCheckpointError(
            f"{file} has format {written}, and this version of Fivefold reads formats up to {FORMAT}: use the newer "
            "version that wrote it"
        )
    try:
        content = TypeAdapter(Manifest).validate_python(values)
        datetime.fromisoformat(content.saved)  # readers show it as a time
        return content
    except ValueError as error:
        raise DamagedCheckpointError(f"{file} is damaged: it is not of the form of a manifest ({error!r})") from error


def verify(folder: Path, *, deep: bool, on_bytes: Callable[[int], None] = lambda count: None) -> list[str]:
    """Compare the files of a checkpoint with its manifest, and return one line for each problem; none if it is whole.

    Args:
        folder: the checkpoint.
        deep: whether every file is read and its digest compared; otherwise only the sizes are.
        on_bytes: called with the number of bytes of each block that was read, from several threads.
    """
    try:
        manifest = read(folder)
    except (DamagedCheckpointError, NewerCheckpointError) as error:
        return [str(error)]
    return compare(folder, manifest, deep=deep, on_bytes=on_bytes)


def compare(
    folder: Path, manifest: Manifest, *, deep: bool, on_bytes: Callable[[int], None] = lambda count: None
) -> list[str]:
    """Compare the files in `folder` with `manifest`, as `verify` does."""

    def problem(item: tuple[str, FileEntry]) -> str | None:
        name, entry = item
        return _problem(folder / name, entry, deep, on_bytes)

    # Reading and hashing release the interpreter's lock, and one reader alone does not use a fast disk.
    with ThreadPoolExecutor(READERS) as pool:
        return [line for line in pool.map(problem, manifest.files.items()) if line is not None]


def _problem(path: Path, entry: FileEntry, deep: bool, on_bytes: Callable[[int], None]) -> str | None:
    """Return what is wrong with a file, None if nothing is."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return f"{path} is no file, but a folder, a pipe or a device"
        if (size := status.st_size) != entry.bytes:
            return f"{path} has {size:,} bytes, and {entry.bytes:,} were written: it is truncated or another file"
        if deep and digest(path, on_bytes) != entry.xxh3_128:
            return f"{path} is damaged: its checksum is not the one that was written"
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None


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


def _own_digest(values: Mapping[str, Any]) -> str:
    return xxh3_128_hexdigest(_text(values).encode())


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=1, sort_keys=True, ensure_ascii=True) + "\n"
