"""The metrics of a run as columns, read from `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fivefold.json_text import parsed_object
from fivefold.report.growing import GrowingLines

STEP = "step"
NAN = float("nan")


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


class MetricsFile:
    """A file of metrics that grows: `read` reads what has come since the last call."""

    def __init__(self, path: Path) -> None:
        self._lines = GrowingLines(path)
        self._columns: dict[str, list[float]] = {STEP: []}
        self.beginnings = 1
        """How often the file was read from its first line: once, and whenever a resumed run has cut it back."""

    def read(self) -> Series:
        """Return the metrics of all steps; a file that is missing has none.

        A last line that is still being written, and one that a lost machine has torn, are left out.
        """
        if self._lines.begin_anew_if_changed():
            self._columns = {STEP: []}
            self.beginnings += 1
        for _, line in self._lines.new():
            self._add(line)
        return Series({name: np.array(values, np.float32) for name, values in self._columns.items()})

    def _add(self, line: bytes) -> None:
        try:
            record = parsed_object(line)
        except ValueError:
            return
        if not isinstance(record.get(STEP), int):
            return
        n = len(self._columns[STEP])
        for name in record:
            if name not in self._columns:
                self._columns[name] = [NAN] * n
        for name, values in self._columns.items():
            value = record.get(name)
            values.append(float(value) if isinstance(value, (int, float)) else NAN)
