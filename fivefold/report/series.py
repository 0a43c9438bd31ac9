"""The metrics of a run as columns, read from `metrics.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

STEP = "step"


@dataclass(frozen=True)
class Series:
    """The metrics of n steps."""

    columns: Mapping[str, npt.NDArray[np.float32]]
    """float32 [n] each, by name, `step` among them; NaN where a step lacks the metric or it was not finite."""

    def __len__(self) -> int:
        return len(self.columns[STEP])

    def last(self, name: str) -> float | None:
        """Return the last known value of a metric; None if there is none."""
        known = self.known(name)
        return float(known[-1]) if len(known) else None

    def known(self, name: str) -> npt.NDArray[np.float32]:
        """Return the values of a metric without the steps that lack it."""
        column = self.columns.get(name)
        return np.empty(0, np.float32) if column is None else column[~np.isnan(column)]

    def since(self, row: int) -> Series:
        """Return the steps from row `row`, counted from 0, on."""
        return Series({name: column[row:] for name, column in self.columns.items()})


def records(path: Path, offset: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each whole line of a file of JSON lines from byte `offset` on, with the offset behind it.

    A last line that is still being written, and one that a lost machine has torn, are left out.
    """
    if not path.exists():
        return
    with path.open("rb") as lines:
        lines.seek(offset)
        for line in lines:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record, offset


def read_series(path: Path) -> Series:
    """Read the metrics of all steps; a file that is missing has none."""
    rows = [record for record, _ in records(path) if isinstance(record.get(STEP), int)]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: np.array([_number(row.get(name)) for row in rows], np.float32) for name in (STEP, *names)}
    return Series(columns)


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")
