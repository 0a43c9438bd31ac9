"""The table of steps as text: which columns fit a width, and how their numbers are formatted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fivefold.observe.columns import Column, Kind

MISSING = "-"
GAP = " "
BAR = " | "
TOTAL = "seconds"
"""Label of the column with the seconds of the whole step."""
WHOLE_STEP = "seconds/step"
"""The metric in that column. Without it, phases are added up, although some of them may run in parallel."""
LEAST_PHASES = 2
"""Phases besides `rest` that stay on a narrow screen, in place of columns of metrics."""
REST = "rest"
"""Label of the column with the seconds of all phases without their own column."""


class StepTable:
    """Aligned lines, one per step, none longer than `width` characters.

                                                                            |                       weight
        step reward   acc      KL entropy  clip   gnorm      lr   len tok/s | seconds rollout train   sync
        1/50  0.312 0.312 0.00012   1.204 0.000   0.531 1.0e-06   214 31.2k |    12.1     8.0   3.6    0.5

    The phases of the step given to `header` become columns. If not all fit, the longest ones stay, and the others are
    added up as `rest`. On a narrow screen, columns of metrics are left out until the longest phases fit.
    """

    def __init__(self, columns: Sequence[Column], n_steps: int, width: int) -> None:
        self._columns = columns
        self._n_steps = n_steps
        self._width = width
        self._step_width = max(len("step"), len(f"{n_steps}/{n_steps}"))
        self._shown: list[Column] = []
        self._known: set[Column] = set()
        """Optional columns whose metric the step of the last header had."""
        self._phases: list[str] = []

    def header(self, metrics: Mapping[str, float | None], seconds: Mapping[str, float]) -> list[str]:
        """Return the one or two lines of labels. The metrics and phases of a step decide which columns there are."""
        self._known = self._optional(metrics)
        self._shown = self._fitting_columns(metrics, seconds)
        self._phases = self._fitting(seconds)
        widths = [self._step_width, *(column.width for column in self._shown)]
        labels = ["step", *(column.label for column in self._shown)]
        left = GAP.join(label.rjust(width) for label, width in zip(labels, widths, strict=True))
        upper, lower = [" " * len(TOTAL)], [TOTAL]
        for phase in self._phases:
            over, _, under = phase.rpartition(" ")
            upper.append(over.rjust(_phase_width(phase)))
            lower.append(under.rjust(_phase_width(phase)))
        lines = [left + BAR + GAP.join(lower)]
        if any(" " in phase for phase in self._phases):
            lines.insert(0, " " * len(left) + BAR + GAP.join(upper))
        return lines

    def needs_header(self, metrics: Mapping[str, float | None]) -> bool:
        """Return whether a step has a metric of an optional column that the last header left out."""
        return not self._optional(metrics) <= self._known

    def _optional(self, metrics: Mapping[str, float | None]) -> set[Column]:
        return {column for column in self._columns if column.is_optional and metrics.keys() & set(column.keys)}

    def row(self, step: int, metrics: Mapping[str, float | None], seconds: Mapping[str, float]) -> str:
        """Return the line of one step in the columns of the last header. A missing or non-finite value is "-"."""
        cells = [f"{step}/{self._n_steps}".rjust(self._step_width)]
        cells += [_cell(column, metrics) for column in self._shown]
        times = [_seconds(metrics.get(WHOLE_STEP, sum(seconds.values())), len(TOTAL))]
        times += [self._phase_cell(phase, seconds) for phase in self._phases]
        return GAP.join(cells) + BAR + GAP.join(times)

    def _phase_cell(self, phase: str, seconds: Mapping[str, float]) -> str:
        if phase != REST:
            return _seconds(seconds.get(phase), _phase_width(phase))
        others = [value for name, value in seconds.items() if name not in self._phases]
        return _seconds(sum(others), _phase_width(REST))

    def _fitting_columns(self, metrics: Mapping[str, float | None], seconds: Mapping[str, float]) -> list[Column]:
        optional = self._optional(metrics)
        shown = [column for column in self._columns if not column.is_optional or column in optional]
        longest = sorted(seconds, key=lambda name: -seconds[name])[:LEAST_PHASES]
        names = longest if len(longest) == len(seconds) else [*longest, REST]
        needed = sum(_phase_width(name) + len(GAP) for name in names)
        while self._room(shown) < needed and any(column.rank for column in shown):
            shown.remove(max(shown, key=lambda column: column.rank))
        return shown

    def _room(self, columns: Sequence[Column]) -> int:
        """Return the number of characters that `columns` leave for phases."""
        used = self._step_width + sum(column.width + len(GAP) for column in columns) + len(BAR) + len(TOTAL)
        return self._width - used

    def _fitting(self, seconds: Mapping[str, float]) -> list[str]:
        room = self._room(self._shown)
        if sum(_phase_width(phase) + len(GAP) for phase in seconds) <= room:
            return list(seconds)
        room -= _phase_width(REST) + len(GAP)
        fitting: set[str] = set()
        for phase in sorted(seconds, key=lambda name: -seconds[name]):
            need = _phase_width(phase) + len(GAP)
            if need <= room:
                fitting.add(phase)
                room -= need
        return [phase for phase in seconds if phase in fitting] + [REST]


def number(value: float | None, kind: Kind, width: int = 7) -> str:
    """Format `value` in at most `width` characters if possible.

    fixed: 0.312, 123.4     short: 0.0012, 1.2e-05, 31.5     rate: 1.0e-06     count: 214, 3.1k
    """
    if value is None or not math.isfinite(value):
        return MISSING
    text = _number(value, kind)
    shorter = (f"{value:z.{digits}f}" for digits in (2, 1, 0)) if kind == "fixed" else ()
    return next((each for each in (text, *shorter, f"{value:.1e}") if len(each) <= width), f"{value:.0e}")


def _number(value: float, kind: Kind) -> str:
    if kind == "fixed":
        return f"{value:z.3f}"
    if kind == "rate":
        return f"{value:.1e}"
    if kind == "count":
        return _count(value)
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1000:
        # Three significant digits without an exponent.
        decimals = max(0, 2 - math.floor(math.log10(abs(value))))
        return f"{value:.{min(decimals, 5 - (value < 0))}f}"
    return f"{value:.1e}"


def _count(value: float) -> str:
    for limit, divisor, suffix in ((1e4, 1.0, ""), (1e7, 1e3, "k"), (1e10, 1e6, "M")):
        if abs(value) < limit:
            scaled = value / divisor
            return (
                f"{scaled:.1f}{suffix}"
                if abs(scaled) < 100 and (suffix or not scaled.is_integer())
                else f"{scaled:.0f}{suffix}"
            )
    return f"{value:.0e}"


def _cell(column: Column, metrics: Mapping[str, float | None]) -> str:
    value = next((metrics[key] for key in column.keys if key in metrics), None)
    return number(value, column.kind, column.width).rjust(column.width)


def _seconds(value: float | None, width: int) -> str:
    text = MISSING if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
    return text.rjust(width)


def _phase_width(phase: str) -> int:
    over, _, under = phase.rpartition(" ")
    return max(5, len(over), len(under))
