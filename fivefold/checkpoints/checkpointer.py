"""Decides when a checkpoint is due, and writes it while training continues.

is_due   after each step
begin    the state is copied                        training waits
commit   the checkpoint is written                  in the background
finish   the last checkpoint is on the disk         training waits, before the next `begin` and at the end
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from math import isfinite
from types import TracebackType
from typing import Self

from fivefold.checkpoints.run_state import MetricHistory, RunState
from fivefold.checkpoints.writer import Begun, CheckpointWriter
from fivefold.config.problems import did_you_mean
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


EVALUATION = "eval/"
"""Beginning of the names of metrics that only steps with an evaluation have."""


class Checkpointer:
    """Decides when a checkpoint is due, and writes it. It is a context manager; only one thread may use it."""

    def __init__(self, writer: CheckpointWriter, *, schedule: Schedule, history: MetricHistory | None) -> None:
        """Write nothing yet.

        Args:
            writer: what writes the checkpoints; the copy counts for its timers' phase `checkpoint`.
            schedule: the frequencies of `recover`.
            history: values of the metric `recover.keep_best` at the steps before; None if there are none.
        """
        self._writer = writer
        self._schedule = schedule
        self._writes = writer.recipe.recover.is_enabled
        best = writer.recipe.recover.keep_best
        if history is None or history.name != best:
            history = None if best is None else MetricHistory(best, {})
        self._history = history
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._begun: Begun | None = None
        self._writing: Future[None] | None = None
        self._has_told = False
        """Whether the user knows that a step lacks the metric of `recover.keep_best`."""

    @property
    def longest_write(self) -> float:
        """Longest time, in seconds, that a checkpoint took to be copied and written."""
        return self._writer.longest_write

    def is_due(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether a checkpoint is due after `step`, whose metrics are `metrics`."""
        if not self._writes:
            return False
        self._look_for_metric(step, metrics)
        return self._schedule.is_due(step) or self._is_best(metrics)

    def begin(self, state: RunState, metrics: Mapping[str, float]) -> None:
        """Copy the state of the run; if the checkpoint before is not on the disk yet, wait for it first.

        Raises:
            RunFailed: a checkpoint could not be written.
        """
        with self._writer.timers.phase("checkpoint"):
            self.finish()
            if self._history is not None and (value := self._kept_value(metrics)) is not None:
                self._history = self._history.with_value(state.step, value)
            saved = datetime.now(UTC).isoformat(timespec="seconds")
            began = time.monotonic()
            folder = self._writer.copy(state.step)
            seconds = time.monotonic() - began
            self._begun = Begun(folder, replace(state, kept_metric=self._history), saved, seconds)
            self._schedule.done()

    def commit(self) -> None:
        """Write the checkpoint that was begun, if any, in the background. What it refers to must be on the disk.

        Raises:
            RunFailed: an earlier checkpoint could not be written.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            self._writing = self._pool.submit(self._writer.write, begun)
        elif self._writing is not None and self._writing.done():
            self.finish()

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises:
            RunFailed: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After a failure nobody waits: the workers may be gone, and a checkpoint that is not committed does not count.
        self._pool.shutdown(wait=error is None, cancel_futures=True)

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        """Return whether `metrics` have a better value of `recover.keep_best` than every checkpoint that is kept."""
        if self._history is None or (value := self._kept_value(metrics)) is None:
            return False
        return self._history.exceeds(value, {checkpoint.step for checkpoint in self._writer.store.all()})

    def _look_for_metric(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell the user, once, that a step lacks the metric of `recover.keep_best`, whose name may be misspelled."""
        if self._history is None or self._has_told:
            return
        name = self._history.name
        # Steps without an evaluation say nothing about its metrics.
        of_its_kind = [one for one in metrics if one.startswith(EVALUATION) == name.startswith(EVALUATION)]
        if of_its_kind and name not in metrics:
            meant = did_you_mean(name, of_its_kind)
            self._writer.note(f"recover.keep_best={name}: step {step} has no such metric{meant}")
            self._has_told = True

    def _kept_value(self, metrics: Mapping[str, float]) -> float | None:
        """Return the value of `recover.keep_best`; None if there is none, or one that is not finite."""
        value = None if self._history is None else metrics.get(self._history.name)
        return value if value is not None and isfinite(value) else None
