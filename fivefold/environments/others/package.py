"""Imports the packages of other projects. Fivefold itself needs none of them."""

from __future__ import annotations

import importlib
from typing import Any


def imported(package: str, extra: str) -> Any:
    """Import a package.

    Args:
        package: its name in Python.
        extra: the extra of Fivefold that installs it.

    Raises:
        ValueError: it, or a package that it needs, is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"{package} cannot be imported ({error}): pip install 'fivefold[{extra}]'") from error
