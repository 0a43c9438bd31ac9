"""What a tracker of experiments does, and what it is told of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

SAMPLE_COLUMNS = ("step", "prompt", "response", "ground_truth", "reward", "finish_reason")
"""Columns of the table of samples."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker is told of it when it opens."""

    project: str
    """The experiment's name."""
    name: str
    """The trial's name."""
    key: str
    """Identifies the run in the tracker; the same for every start of one run."""
    is_new: bool
    """Whether this is the run's first start."""
    config: Mapping[str, Any]
    """The resolved recipe, under dotted keys, and the places of the run's files."""
    folder: Path
    """Folder for what the tracker keeps on this machine."""


class Tracker(Protocol):
    """One tracker of one run. It is used from a single thread, and may raise anything."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the finite metrics of a step."""

    def finish(self, summary: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
        """Log the summary and a table of samples, each with `SAMPLE_COLUMNS`, and close. Both may be empty."""


def sample_rows(samples: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the rows of a table of samples; a ground truth that is no text is written as one."""
    return [
        [value if isinstance(value := sample.get(name), int | float) else str(value) for name in SAMPLE_COLUMNS]
        for sample in samples
    ]


def numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the entries of a summary that are numbers."""
    return {name: float(value) for name, value in summary.items() if isinstance(value, int | float)}
