"""Files of JSON lines: reading them, cutting them back, and writing them whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fivefold.json_text import parsed_object
from fivefold.observe.durable import replacing, write_file
from fivefold.observe.jsonl import finite, json_line


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
    write_file(path, "".join(map(json_line, lines)).encode(errors="backslashreplace"))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` to `path` atomically. Readers see the old file or the new one, never a part."""
    text = json.dumps(finite(value), indent=2, ensure_ascii=False) + "\n"
    write_file(path, text.encode(errors="backslashreplace"))
