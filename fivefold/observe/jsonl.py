"""JSON files that any program can read: on disk as soon as they are written, and without NaN."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from fivefold.observe.durable import name_file, naming


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
                self._file.write(json_line(record))
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


def json_line(record: Mapping[str, Any]) -> str:
    """Return `record` as a line, with null for floats that are not finite."""
    return json.dumps(finite(record), ensure_ascii=False) + "\n"


def finite(value: Any) -> Any:
    """Return `value` with each float that JSON cannot hold (NaN, infinities) replaced by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
