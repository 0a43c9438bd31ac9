"""When an action of a recipe is due, such as a checkpoint or an evaluation, and when a run must end to be saved."""

from __future__ import annotations

import time
from collections.abc import Callable

from fivefold.config.schema.run import PeriodicConfig

LONGER = 1.25
"""How much longer than the longest step so far the next one may take."""
CLOSING_S = 5.0
"""Seconds that are kept for ending the processes."""


class Schedule:
    """The three frequencies of a recipe's section; the action is due as soon as one of them says so.

    schedule = Schedule(recipe.saver, total_steps=50, steps_per_epoch=10)
    if schedule.is_due(step):
        actor.save(...)
        schedule.done()
    """

    def __init__(
        self,
        config: PeriodicConfig,
        *,
        total_steps: int,
        steps_per_epoch: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start to measure the time.

        Args:
            config: the frequencies.
            total_steps: the last step, after which the action is always due.
            steps_per_epoch: number of steps of one pass over the data set.
            clock: returns the time in seconds.
        """
        self._config = config
        self._total_steps = total_steps
        self._steps_per_epoch = steps_per_epoch
        self._clock = clock
        self._last = clock()

    def is_due(self, step: int) -> bool:
        """Return whether the action is due after `step`, counted from 1."""
        config = self._config
        intervals = (
            config.freq_steps,
            None if config.freq_epochs is None else config.freq_epochs * self._steps_per_epoch,
        )
        return (
            step == self._total_steps
            or any(interval is not None and step % interval == 0 for interval in intervals)
            or (config.freq_secs is not None and self._clock() - self._last >= config.freq_secs)
        )

    def done(self) -> None:
        """Measure `freq_secs` from now on, because the action was done."""
        self._last = self._clock()


class TimeLimit:
    """The time limit of a command, `recover.save_before`: after which step the run must end, while it can be saved."""

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
