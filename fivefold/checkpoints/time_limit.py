"""The time limit of a command, `recover.save_before`: the run ends while there is time left to save it."""

from __future__ import annotations

import time
from collections.abc import Callable

LONGER = 1.25
"""How much longer than the longest step so far the next one may take."""
CLOSING_S = 5.0
"""Seconds that are kept for ending the processes."""


class TimeLimit:
    """Tells after which step the run must end."""

    def __init__(self, seconds: float | None, *, began: float, clock: Callable[[], float] = time.perf_counter) -> None:
        """Begin to measure the first step.

        Args:
            seconds: the limit; None: there is none.
            began: time on `clock` at which the command was started.
            clock: returns the time in seconds.
        """
        self._seconds = seconds
        self._began = began
        self._clock = clock
        self._step_began = clock()
        self._longest_step = 0.0

    def is_near(self, write_s: float) -> bool:
        """Return whether another step and the writing of its state might not fit in; call it once, after each step.

        Args:
            write_s: seconds that the writing of a checkpoint took so far.
        """
        now = self._clock()
        self._longest_step = max(self._longest_step, now - self._step_began)
        self._step_began = now
        needed = LONGER * (self._longest_step + write_s) + CLOSING_S
        return self._seconds is not None and now - self._began + needed > self._seconds
