"""When an action of the recipe, such as a checkpoint or an evaluation, is due."""

from __future__ import annotations

import time
from collections.abc import Callable

from fivefold.config.schema.run import PeriodicConfig


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
