"""JSON files that any program can read: on disk as soon as they are written, and without NaN."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fivefold.observe.durable import naming, replacing, write_file


class JsonLines:
    """A file with one JSON object per line, to which several threads may append."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Half a surrogate pair has no UTF-8 encoding. JSON writes it as a backslash and its code point.
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        self._lock = threading.Lock()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record`; floats that are not finite are written as null."""
        line = json.dumps(finite(record), ensure_ascii=False) + "\n"
        with self._lock, naming(self._path):
            self._file.write(line)
            self._file.flush()

    def sync(self) -> None:
        """Wait until all lines are on the disk, where they survive the machine."""
        with self._lock, naming(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        with naming(self._path):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; a missing file has none, and lines that are not whole are left out."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            if _step_of(line) is not None:
                yield json.loads(line)


def cut_back(path: Path, step: int) -> None:
    """Delete, atomically, the lines of steps after `step`, and lines that are not whole; a missing file is left so."""
    if not path.exists():
        return
    with replacing(path) as part, path.open("rb") as lines:
        part.writelines(line for line in lines if (number := _step_of(line)) is not None and number <= step)


def _step_of(line: bytes) -> int | None:
    """Return the step of a line; None if it is not whole or has none."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:  # half a line, or bytes that a machine that lost its power has left
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` to `path` atomically: a reader sees the old file or the new one, never a part."""
    text = json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n"
    write_file(path, text.encode(errors="backslashreplace"))


def finite(value: Any) -> Any:
    """Return `value` with each float that JSON cannot hold (NaN, infinities) replaced by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
