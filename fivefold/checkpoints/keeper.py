"""Saves a run while it goes on, and ends it after a step when it is asked to.

step ─> after_step: is a checkpoint due? is the run to end?  ─> copy of the state
     ─> the step's metrics and samples are logged
     ─> step_logged: the checkpoint is written in the background; a run that is to end ends here
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Protocol

from fivefold.checkpoints.run_state import RunState
from fivefold.checkpoints.time_limit import TimeLimit
from fivefold.checkpoints.writer import Checkpointer
from fivefold.cluster.interrupt import EndRequest, ending_after_a_step
from fivefold.config.schema import RecoverConfig
from fivefold.observe.errors import RunStopped


class Log(Protocol):
    """A file to which every step appends."""

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""


class Keeper:
    """Tells the training loop's steps to the checkpointer, and ends the run when it was asked to end."""

    def __init__(
        self, checkpoints: Checkpointer, limit: TimeLimit, request: EndRequest, logs: Sequence[Log], total_steps: int
    ) -> None:
        self._checkpoints = checkpoints
        self._limit = limit
        self._request = request
        self._logs = logs
        self._total_steps = total_steps
        self._ends_because: str | None = None
        self._begun = False

    def after_step(self, step: int, metrics: Mapping[str, float], state: Callable[[], RunState]) -> None:
        """Copy the state, which `state` returns, if a checkpoint is due after `step` or the run is to end.

        Raises:
            RunFailed: a checkpoint could not be written.
        """
        is_near = self._limit.is_near(self._checkpoints.longest_write)
        if self._request.made:
            self._ends_because = "it was asked to"
        elif is_near:
            self._ends_because = "recover.save_before leaves no time for another step"
        self._begun = self._ends_because is not None or self._checkpoints.is_due(step, metrics)
        if self._begun:
            self._checkpoints.begin(state(), metrics)

    def step_logged(self, step: int) -> None:
        """Write the checkpoint of `step`, whose metrics and samples have been logged, in the background.

        Raises:
            RunFailed: a checkpoint could not be written.
            RunStopped: the run ends early; its checkpoint is on the disk.
        """
        if self._begun:
            for log in self._logs:
                log.sync()
        self._checkpoints.commit()
        if step == self._total_steps:
            self._checkpoints.finish()
        elif self._ends_because is not None:
            self._checkpoints.finish()
            raise RunStopped(f"The run ended after step {step} of {self._total_steps}, because {self._ends_because}.")


@contextmanager
def keeping(
    config: RecoverConfig, checkpoints: Checkpointer, logs: Sequence[Log], *, total_steps: int, began: float
) -> Iterator[Keeper]:
    """Yield the keeper of a training loop. Inside the block, Ctrl-C and SIGTERM end the run after the step in progress.

    Without checkpoints they end it at once, because there is nothing to save.

    Args:
        config: the section `recover` of the recipe.
        checkpoints: writes the checkpoints.
        logs: what is synced before a checkpoint is committed.
        total_steps: the last step.
        began: time on `time.perf_counter` at which the command was started.
    """
    signals = ending_after_a_step() if config.is_enabled else nullcontext(EndRequest())
    limit = TimeLimit(config.save_before if config.is_enabled else None, began=began)
    with signals as request, checkpoints:
        yield Keeper(checkpoints, limit, request, logs, total_steps)
