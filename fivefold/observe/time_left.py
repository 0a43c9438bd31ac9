"""How long a run still takes, by the steps that it has made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

RECENT = 20
"""Steps whose mean is taken: the last ones, because steps become longer or shorter as answers do."""


@dataclass(frozen=True)
class TimeLeft:
    """An estimate."""

    seconds: float
    by_first_step: bool
    """Whether only the first step is known, which takes longer than the others."""

    @property
    def doubt(self) -> str:
        """What a reader should know of it: a text behind the estimate, or an empty one."""
        return ", by the first step" if self.by_first_step else ""


def time_left(steps: Sequence[float], n_left: int) -> TimeLeft | None:
    """Estimate the time of the steps that are left; None before the first step and behind the last one.

    The first step counts only as long as it is the only one: it compiles kernels and allocates memory.

    Args:
        steps: seconds of each step until now.
        n_left: number of further steps.
    """
    if not steps or not n_left:
        return None
    return TimeLeft(fmean(steps[1:][-RECENT:] or steps) * n_left, by_first_step=len(steps) == 1)
