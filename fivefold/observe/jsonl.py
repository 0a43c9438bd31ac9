"""JSON files that any program can read: on disk as soon as they are written, and without NaN."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from fivefold.json_text import parsed_object
from fivefold.observe.durable import name_file, naming, replacing, write_file


class JsonLines:
    """A file with one JSON object per line. Several threads may append."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # UTF-8 cannot encode lone surrogates. JSON writes them as a backslash and the code point.
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")
        self._lock = threading.Lock()

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record`. Floats that are not finite are written as null."""
        try:
            with self._lock:
                self._file.write(_line(record))
                self._file.flush()
        except OSError as error:
            name_file(error, self._path)
            raise

    def sync(self) -> None:
        """Wait until all lines are on the disk and survive a crash of the machine."""
        with self._lock, naming(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        with naming(self._path):
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file. A missing file has none; incomplete lines are skipped."""
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for line in lines:
            if (record := _record(line)) is not None:
                yield record


def cut_back(path: Path, step: int) -> None:
    """Delete, atomically, incomplete lines and the lines of steps after `step`. A missing file stays missing."""
    if not path.is_file():
        return
    with replacing(path) as part, path.open("rb") as lines:
        part.writelines(line for line in lines if (record := _record(line)) is not None and record["step"] <= step)


def _record(line: bytes) -> dict[str, Any] | None:
    """Return the record of a line; None if the line is incomplete or has no step."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = parsed_object(line)
    except ValueError:  # a partial line, or garbage after a power failure
        return None
    return record if isinstance(record.get("step"), int) else None


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write a file with one JSON object per line, atomically, as `JsonLines` writes them."""
    write_file(path, "".join(map(_line, lines)).encode(errors="backslashreplace"))


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(finite(record), ensure_ascii=False) + "\n"


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` to `path` atomically. Readers see the old file or the new one, never a part."""
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
