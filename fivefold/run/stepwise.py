"""A run as an iterator of its steps."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True)
class Step:
    """A training step that is done, with what was due after it."""

    number: int
    """Counted from 1."""
    of: int
    """Steps of the whole run."""
    metrics: Mapping[str, float]
    """What `metrics.jsonl` has of the step."""


T = TypeVar("T")
Steps = Generator[Step, None, T]
"""A run, a step at a time, and what it comes to. Who closes it early leaves a run that the same recipe resumes."""


def to_the_end(steps: Steps[T]) -> T:
    """Make all steps; return what the run comes to."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
