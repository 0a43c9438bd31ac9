"""A step of every command that trains: when results are saved, evaluated, checkpointed and shown, and when a run ends.

state ─> Training.step ─> problem? save? evaluate? ─> is a checkpoint due? is the run to end? ─> copy of the state
  ^   ─> the step's metrics and samples are logged ─> the checkpoint is written in the background
  └────────────────────────────────────────────────── a run that is to end ends here
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fivefold.checkpoints.checkpointer import Checkpointer, Schedule, TimeLimit
from fivefold.checkpoints.run_state import RunState
from fivefold.checkpoints.weights import WeightSaver
from fivefold.cluster.interrupt import EndRequest
from fivefold.observe.errors import RunFailed, RunStopped
from fivefold.observe.step_log import MetricsLog, SampleLog
from fivefold.roles.devices import Models
from fivefold.run.setup import OpenRun
from fivefold.run.whole_run import RunSetup


@dataclass(frozen=True)
class StepDone:
    """What a training step came to."""

    state: RunState
    """The run after the step."""
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    """Seconds of each phase."""
    whole: float
    """Seconds of the step."""
    problem: str | None = None
    """Why the run is to end."""
    news: str | None = None
    """What the user should know of the step."""
    samples: Sequence[tuple[float, str, str]] = ()
    """Samples to show: reward, prompt and response of each."""


class Training(Protocol):
    """What one kind of training does in a step."""

    def begin(self, state: RunState) -> None:
        """Do what comes before the first step."""

    def step(self, state: RunState, samples: SampleLog) -> StepDone:
        """Make the step after `state`; its samples go to the log before they are trained on."""

    def evaluate(self, step: int) -> dict[str, float] | None:
        """Evaluate held-out data after `step`, and tell the user; None: there are none."""

    def take_news(self) -> str | None:
        """Return what else the user should know since the last call."""


def is_over(state: RunState) -> bool:
    """Return whether the run makes no further step."""
    return state.step >= state.total_steps or state.stopped_early is not None


@dataclass
class Loop:
    """The loop, with its logs and what decides when results are kept."""

    setup: RunSetup[Any]
    training: Training
    models: Models
    run: OpenRun
    metrics: MetricsLog
    samples: SampleLog
    checkpoints: Checkpointer
    limit: TimeLimit
    request: EndRequest
    seconds_before: float
    """Time that earlier starts of the run have taken."""
    began: float
    """Time on `time.perf_counter` at which the command was started."""
    saver: Schedule
    evaluator: Schedule
    judge: Callable[[RunState], RunState] | None
    """Compares the last evaluation with the best one, and says whether the run ends early; None: it never does."""
    ends_because: str | None = None
    is_copied: bool = field(default=False)
    """Whether the step has a checkpoint, whose state is copied and not written yet."""

    def begin(self, state: RunState) -> RunState:
        """Prepare the first step, and evaluate models that are not trained yet. Returns the state then."""
        self.training.begin(state)
        if state.step == 0 and self.setup.evaluations_due.before_training:
            evaluation = self.training.evaluate(0)
            state = replace(state, evaluation_before=evaluation, evaluation_last=evaluation)
            state = self.judge(state) if self.judge is not None else state
        self.run.timers.take()
        self.models.take_moved()
        return state

    def step(self, state: RunState) -> tuple[RunState, Mapping[str, float]]:
        """Make the next step, and keep what is to be kept. Returns the state then, and the step's metrics."""
        done = self.training.step(state, self.samples)
        metrics = {**done.metrics, **_seconds(done.seconds), "seconds/step": done.whole, **self.models.take_moved()}
        if done.problem is not None:
            self.metrics.write(state.step + 1, metrics)
            raise RunFailed(done.problem)
        state = self._keep(done.state, metrics)
        screen = self.run.screen
        screen.step(state.step, metrics, done.seconds)
        for note in filter(None, (done.news, self.training.take_news())):
            screen.note(note)
        if done.samples:
            screen.samples(state.step, done.samples)
        self._logged(state)
        return state, metrics

    def leave(self, state: RunState, metrics: Mapping[str, float]) -> None:
        """Write a checkpoint of a run that ends before its last step, unless there is one, or there are none."""
        if self._writes and not self.is_copied and not is_over(state):
            self.checkpoints.begin(state, metrics)
            self.is_copied = True
            self._logged(state)
        self.checkpoints.finish()

    def _keep(self, state: RunState, metrics: dict[str, float]) -> RunState:
        """Save, evaluate and copy the state, as is due, and log the step's metrics, whatever fails."""
        step = state.step
        try:
            is_saved = self.saver.is_due(step)
            if is_saved:
                self._save(step)
                self.saver.done()
            if self.evaluator.is_due(step):
                state = replace(state, evaluation_last=self.training.evaluate(step))
                metrics |= {f"eval/{name}": value for name, value in (state.evaluation_last or {}).items()}
                self.evaluator.done()
                state = self._judged(state)
            if state.stopped_early and not is_saved:
                self._save(step)
            state = replace(state, seconds=self.seconds_before + time.perf_counter() - self.began)
            if self.request.made:
                self.ends_because = "it was asked to"
            elif self.limit.is_near(self.checkpoints.longest_write):
                self.ends_because = "recover.save_before leaves no time for another step"
            is_due = self.checkpoints.is_due(step, metrics) or (state.stopped_early and self._writes)
            self.is_copied = self.ends_because is not None or bool(is_due)
            if self.is_copied:
                self.checkpoints.begin(state, metrics)
            return state
        finally:
            later = _seconds(self.run.timers.take()) | self.models.take_moved()
            # What is saved may take one more hand-over, which counts for the step.
            metrics |= {name: metrics.get(name, 0.0) + value for name, value in later.items()}
            self.metrics.write(step, metrics)

    @property
    def _writes(self) -> bool:
        """Whether the run writes checkpoints."""
        return self.setup.recipe.recover.is_enabled

    def _judged(self, state: RunState) -> RunState:
        """Compare the last evaluation with the best one, and tell the user if the run ends early."""
        if self.judge is None or state.step == state.total_steps:
            return state
        state = self.judge(state)
        if state.stopped_early:
            self.run.screen.note(
                f"the run ends early, after step {state.step} of {state.total_steps}: {state.stopped_early}",
                style="cyan",
            )
        return state

    def _save(self, step: int) -> None:
        """Save the models that are trained as Hugging Face folders."""
        timers, config = self.run.timers, self.setup.recipe.saver
        with timers.phase("save"):
            for name, model in self.models.trained.items():
                with self.models.on_device(model, timers, "params"):
                    WeightSaver(config, self.run.folder.weights_of(name), model.save).save(step)

    def _logged(self, state: RunState) -> None:
        """Write the step's checkpoint in the background, now that metrics and samples are logged.

        Raises:
            RunFailed: a checkpoint could not be written.
            RunStopped: the run ends early; its checkpoint is on the disk.
        """
        if self.run.events is not None:
            self.run.events.step_ended(state.step)
        if self.is_copied:
            self.metrics.sync()
            self.samples.sync()
        self.checkpoints.commit()
        if is_over(state):
            self.checkpoints.finish()
        elif self.ends_because is not None:
            self.checkpoints.finish()
            raise RunStopped(
                f"The run ended after step {state.step} of {state.total_steps}, because {self.ends_because}."
            )


def _seconds(phases: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of phases as metrics."""
    return {f"seconds/{phase}": value for phase, value in phases.items()}
