"""Nested sections as one level of dotted keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value of nested sections under its dotted key; an empty section is a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
