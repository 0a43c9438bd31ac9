"""A run as its folder tells it: how it ended, its numbers, its recipe, and what it ran on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.config.source import read_mapping
from fivefold.json_text import read_object
from fivefold.observe.held_out import LABELS, HeldOut, held_out
from fivefold.observe.run_dir import GOING_ON, STATUS, RunDir, State
from fivefold.observe.timers import TimeLeft, time_left
from fivefold.report.series import MetricsFile, Series

ACCURACY = "eval/accuracy"
BEHIND = ("save", "evaluation", "checkpoint")
"""Phases that come behind what `seconds/step` measures."""


@dataclass(frozen=True)
class Run:
    """What the small files of a run's folder say."""

    folder: RunDir
    state: State
    status: Mapping[str, Any]
    """Content of `status.json`."""
    about: Mapping[str, Any]
    """Content of `about.json`; empty for runs without that file."""
    summary: Mapping[str, Any]
    """Content of `summary.json`; empty until the run has finished."""
    recipe: Mapping[str, Any]
    """The resolved recipe."""
    series: Series

    @staticmethod
    def read(path: Path, metrics: MetricsFile | None = None) -> Run:
        """Read the folder of a run; `metrics`, if it is given, keeps what it has read for the next call.

        Raises:
            ValueError: it is not the folder of a run.
        """
        folder = RunDir(path.resolve())
        status = folder.read_status()
        if status is None and folder.status.is_file():
            raise ValueError(f"{path} holds a run, but its {STATUS} is damaged: start the run again, which rewrites it")
        if status is None:
            raise ValueError(
                f"{path} is not the folder of a run: it has no {STATUS}; name one such as {_example(path)}"
            )
        about = _json(folder.about)
        return Run(
            folder=folder,
            state=folder.present_state(),
            status=status,
            about=about,
            summary=_json(folder.summary),
            recipe=read_mapping(folder.recipe) if folder.recipe.is_file() else {},
            series=(metrics or MetricsFile(folder.metrics)).read(),
        )

    @property
    def name(self) -> str:
        """The names of experiment and trial."""
        return f"{self.folder.path.parent.name}/{self.folder.path.name}"

    @property
    def step(self) -> int:
        """The last step that was logged; 0 before the first."""
        return int(self.series.last("step") or 0)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None where nothing says it."""
        found = self.summary.get("steps"), self.about.get("steps"), self.recipe.get("total_train_steps")
        return next((total for total in found if isinstance(total, int) and total), None)

    @property
    def seconds(self) -> float:
        """Seconds of the run, with earlier starts if it has finished; else the sum of its steps."""
        seconds = self._measured("seconds")
        return sum(self._step_seconds) if seconds is None else seconds

    @property
    def time_left(self) -> TimeLeft | None:
        """An estimate for a run in progress; None for others, and before the first step."""
        if self.state not in GOING_ON or self.total_steps is None:
            return None
        return time_left(self._step_seconds, self.total_steps - self.step)

    @property
    def _step_seconds(self) -> list[float]:
        """Seconds of each step: what it says itself and what comes behind it, or else all of its phases."""
        columns = self.series.columns
        names = [name for name in columns if name.startswith("seconds/")]
        if "seconds/step" in columns:
            names = [name for name in ("seconds/step", *(f"seconds/{phase}" for phase in BEHIND)) if name in columns]
        return np.nansum([columns[name] for name in names], axis=0).tolist() if names else []

    @property
    def best(self) -> tuple[str, float, int] | None:
        """Name, value and step of the best held-out accuracy, or of the training accuracy where there is none."""
        for name in (ACCURACY, "accuracy", "reward/mean"):
            if len(self.series.known(name)):
                column = self.series.columns[name]
                row = int(np.nanargmax(column))
                return name, float(column[row]), int(self.series.columns["step"][row])
        return None

    @property
    def held_out(self) -> HeldOut | None:
        """The measure of the held-out data that the headline tells; None until the run has finished."""
        before, after = ({name: self._measured(f"{name}_{when}") for name in LABELS} for when in ("before", "after"))
        return held_out(before, after)

    @property
    def before(self) -> dict[str, float]:
        """Metrics of the evaluation before training, which no step has; empty until the run has finished."""
        found = {name: self._measured(name) for name in self.summary if name.endswith("_before")}
        return {f"eval/{name.removesuffix('_before')}": value for name, value in found.items() if value is not None}

    def _measured(self, name: str) -> float | None:
        """Return a number of the summary; None: it has none of this name."""
        value = self.summary.get(name)
        return value if isinstance(value, int | float) and math.isfinite(value) else None

    def headline(self) -> str:
        """Return how the run ended or stands, and with what, in one line."""
        if self.state == "finished":
            outcome = f"finished {self.step:,} step{'' if self.step == 1 else 's'} in {duration(self.seconds)}"
        else:
            outcome = f"{self.state} after step {self.step:,}" + (
                f" of {self.total_steps:,}" if self.total_steps else ""
            )
        if (found := self.held_out) is not None:
            return f"{outcome}: {found.label} {found.before:.3f} → {found.after:.3f}"
        if (best := self.best) is not None:
            return f"{outcome}: best {best[0]} {best[1]:.3f} at step {best[2]:,}"
        return outcome

    @property
    def began(self) -> datetime | None:
        """When the run was first started."""
        began = self.status.get("began")
        return datetime.fromisoformat(began) if began else None


def duration(seconds: float) -> str:
    """Format seconds: 42 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    whole = round(seconds)
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    for size, name, smaller, smaller_name in units:
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {name}" + (f" {rest} {smaller_name}" if rest else "")
    return f"{whole} s"


def _json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; an empty one if the file is missing or torn."""
    try:
        return read_object(path)
    except (FileNotFoundError, ValueError):
        return {}


def _example(path: Path) -> str:
    found = next(iter(sorted(path.glob(f"**/{STATUS}"))), None) if path.is_dir() else None
    return str(found.parent if found else "runs/quickstart/trial-0")
