"""Reads JSON that others have written, in which nothing may end in another error than ValueError."""

from __future__ import annotations

import json
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
    value = parsed(text)
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__} and no object")
    return value
