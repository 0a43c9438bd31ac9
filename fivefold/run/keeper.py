"""Saves a run while it goes on, and ends it after a step when it is asked to.

step ─> after_step: is a checkpoint due? is the run to end?  ─> copy of the state
     ─> the step's metrics and samples are logged
     ─> step_logged: the checkpoint is written in the background; a run that is to end ends here
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from fivefold.checkpoints.checkpointer import Checkpointer
from fivefold.checkpoints.due import Schedule, TimeLimit
from fivefold.checkpoints.run_state import RunState
from fivefold.checkpoints.store import CheckpointStore
from fivefold.checkpoints.writer import StateOwner
from fivefold.cluster.interrupt import EndRequest, ending_after_a_step
from fivefold.config.schema.recipe import Recipe
from fivefold.observe.errors import RunStopped
from fivefold.observe.step_log import MetricsLog, SampleLog
from fivefold.observe.timers import EventLog
from fivefold.run.setup import OpenRun


class Keeper:
    """Has the logs of a run, tells its steps to the checkpointer, and ends it when it was asked to end."""

    def __init__(
        self,
        metrics: MetricsLog,
        samples: SampleLog,
        checkpoints: Checkpointer,
        limit: TimeLimit,
        request: EndRequest,
        *,
        seconds: float,
        began: float,
        events: EventLog | None = None,
    ) -> None:
        """Keep a run.

        Args:
            metrics: the log of every step's metrics.
            samples: the log of samples.
            checkpoints: writes the checkpoints.
            limit: the time limit of the command.
            request: whether the user has asked the run to end.
            seconds: time that earlier starts of the run have taken.
            began: time on `time.perf_counter` at which the command was started.
            events: records the ends of the steps; None: nothing is recorded.
        """
        self._events = events
        self.metrics = metrics
        self.samples = samples
        self._checkpoints = checkpoints
        self._limit = limit
        self._request = request
        self._seconds = seconds
        self._began = began
        self._ends_because: str | None = None
        self._begun = False

    def after_step(self, state: RunState, metrics: Mapping[str, float]) -> RunState:
        """Copy the state of the run if a checkpoint is due after its step, or if the run is to end.

        Returns:
            The state, with the time that the run has taken.

        Raises:
            RunFailed: a checkpoint could not be written.
        """
        state = replace(state, seconds=self._seconds + time.perf_counter() - self._began)
        is_near = self._limit.is_near(self._checkpoints.longest_write)
        if self._request.made:
            self._ends_because = "it was asked to"
        elif is_near:
            self._ends_because = "recover.save_before leaves no time for another step"
        self._begun = self._ends_because is not None or self._checkpoints.is_due(state.step, metrics)
        if self._begun:
            self._checkpoints.begin(state, metrics)
        return state

    def step_logged(self, state: RunState) -> None:
        """Write the checkpoint of a step, whose metrics and samples have been logged, in the background.

        Raises:
            RunFailed: a checkpoint could not be written.
            RunStopped: the run ends early; its checkpoint is on the disk.
        """
        if self._events is not None:
            self._events.step_ended(state.step)
        if self._begun:
            self.metrics.sync()
            self.samples.sync()
        self._checkpoints.commit()
        if state.step == state.total_steps:
            self._checkpoints.finish()
        elif self._ends_because is not None:
            self._checkpoints.finish()
            raise RunStopped(
                f"The run ended after step {state.step} of {state.total_steps}, because {self._ends_because}."
            )


@contextmanager
def keep(
    run: OpenRun,
    recipe: Recipe,
    owners: Mapping[str, StateOwner],
    state: RunState,
    schedule: Schedule,
    began: float,
) -> Iterator[Keeper]:
    """Yield the keeper of a training loop. Inside the block, Ctrl-C and SIGTERM end the run after the step in progress.

    Without checkpoints they end it at once, because there is nothing to save.

    Args:
        run: folder, screen and timers of the run.
        recipe: its recipe.
        owners: whose state is saved, by the folder of a checkpoint that gets it.
        state: the state of the run before its next step.
        schedule: the frequencies of checkpoints.
        began: time on `time.perf_counter` at which the command was started.
    """
    folder, config = run.folder, recipe.recover
    tensorboard = folder.tensorboard if "tensorboard" in recipe.stats.trackers else None
    checkpoints = Checkpointer(
        recipe,
        CheckpointStore(folder.checkpoints),
        owners,
        run.timers,
        schedule=schedule,
        history=state.kept_metric,
        note=run.screen.note,
        is_ours=folder.is_ours,
    )
    limit = TimeLimit(config.save_before if config.is_enabled else None, began=began)
    with (
        MetricsLog(folder.metrics, tensorboard, run.trackers, first_step=state.step + 1) as metrics,
        SampleLog(folder.samples, folder.sample_parts, run.trackers) as samples,
        ending_after_a_step() if config.is_enabled else nullcontext(EndRequest()) as request,
        checkpoints,
    ):
        yield Keeper(
            metrics, samples, checkpoints, limit, request, seconds=state.seconds, began=began, events=run.events
        )
