"""The table of frameworks whose configurations can be imported.

A framework is a word in `Framework` and a folder of that name: `keys.yaml` has a row for each of its keys, `rules` the
rules of rows that are written in Python, and `dialect` offers a `DIALECT`: for each task, the keys that need other keys
to be converted, and the signs of the task.

The command line reads this table for its help, so nothing else is imported until a dialect is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fivefold_import.dialect import Dialect

Framework = Literal["areal", "miles", "nemo_rl", "roll", "siirl", "skyrl", "slime", "trinity", "verl"]
"""The name of a framework, as `fivefold import --from` takes it."""


def dialect_of(framework: Framework) -> Dialect:
    """Return the `DIALECT` of a framework's folder."""
    return import_module(f"fivefold_import.{framework}.dialect").DIALECT
