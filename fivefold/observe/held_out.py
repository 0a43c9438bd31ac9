"""The measure of the held-out data that sums up a run in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LABELS = {"accuracy": "held-out accuracy", "reward": "held-out reward", "nll": "held-out loss"}
"""Measures that can sum up a run, the most telling first, with their labels."""


@dataclass(frozen=True)
class HeldOut:
    """A measure of the held-out data before and after training."""

    label: str
    before: float
    after: float


def held_out(before: Mapping[str, float | None], after: Mapping[str, float | None]) -> HeldOut | None:
    """Return the first measure of `LABELS` that both evaluations have; None if there is none.

    A measure that is 0 in both gives way to the next. Accuracy is always 0 if rewards never reach 1, such as the scores
    of a reward model.
    """
    found = [
        HeldOut(label, first, last)
        for name, label in LABELS.items()
        if (first := before.get(name)) is not None and (last := after.get(name)) is not None
    ]
    return next((each for each in found if each.before or each.after), found[0] if found else None)
