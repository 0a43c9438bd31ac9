"""Reads JSON that others have written, in which nothing may end in another error than ValueError."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any


def parsed(text: str | bytes) -> Any:
    """Return the value that a JSON text stands for.

    Raises:
        ValueError: it is not JSON, or nested too deep for Python's reader, which raises RecursionError.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deep to be read") from error


def parsed_object(text: str | bytes) -> dict[str, Any]:
    """Return the JSON object that a text stands for.

    Raises:
        ValueError: see `parsed`; or it stands for something else.
    """
    return _object(parsed(text))


def read_json(file: Path) -> Any:
    """Return the value that a JSON file holds.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: see `parsed`; or it is a folder, or a pipe, whose end might never come.
    """
    if not stat.S_ISREG(file.stat().st_mode):
        raise ValueError("it is a folder, a pipe or a device, and no file")
    return parsed(file.read_bytes())


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object that a file holds.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: see `read_json` and `parsed_object`.
    """
    return _object(read_json(file))


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__} and no object")
    return value
