"""Rows of parametrized tests for `make test-long`: what other rows show, on further layouts, models or frameworks."""

from __future__ import annotations

from typing import Any

import pytest


def long(*rows: Any) -> list[Any]:
    """Return rows that are marked `long`. A row of several arguments is a tuple."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.long) for row in rows]
