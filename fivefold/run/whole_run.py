"""The frame of every training command: from where it starts to its summary.

recipe ─> set up ─> where its checkpoint ended ─> folder, screen, machines ─> roles and loop ─> summary.json
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar

from fivefold.checkpoints.changes import RecipeChangedError
from fivefold.checkpoints.checkpointer import Schedule
from fivefold.checkpoints.recovery import find_start
from fivefold.checkpoints.run_state import RunState
from fivefold.checkpoints.start import Finished, FromScratch, Item, Resume
from fivefold.cluster.machine import check_devices
from fivefold.config.load import resolved_yaml
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.run import EvaluationsConfig, PeriodicConfig
from fivefold.data.sampler import EpochSampler
from fivefold.layout.parallel import describe
from fivefold.observe.columns import Column
from fivefold.observe.held_out import held_out
from fivefold.observe.machine import versions
from fivefold.observe.screens import ScreenKind, open_screen
from fivefold.observe.timers import PhaseTimers
from fivefold.run.resume import start_facts, state_at_start
from fivefold.run.setup import Groundwork, OpenRun, open_run
from fivefold.run.stepwise import Steps


@dataclass(frozen=True)
class RunSetup(ABC, Generic[Item]):
    """A run as it is known before a process is started."""

    recipe: Recipe
    ground: Groundwork
    sampler: EpochSampler[Item]
    """Reads the training data, step by step."""
    total_steps: int

    def schedule(self, section: PeriodicConfig) -> Schedule:
        """Return when an action of the recipe is due; its time is measured from now on."""
        return Schedule(section, total_steps=self.total_steps, steps_per_epoch=self.sampler.batches_per_epoch)

    @abstractmethod
    def facts(self) -> Mapping[str, object]:
        """Return what the banner says about this kind of run."""

    @abstractmethod
    def warnings(self) -> Iterator[str]:
        """Yield what is odd about the data."""

    @property
    @abstractmethod
    def measured(self) -> tuple[str, ...]:
        """Names of what evaluations measure and the summary has."""

    @property
    def comparable(self) -> tuple[str, ...]:
        """Names of what every evaluation measures, by which runs may end early; the most telling one first."""
        return self.measured

    @property
    @abstractmethod
    def evaluations_due(self) -> EvaluationsConfig:
        """When held-out data are evaluated, besides after the last step."""

    def compared(self) -> str | None:
        """Return the measure that decides whether the run ends early; None: it does not.

        Raises:
            ValueError: the recipe names one that evaluations do not have.
        """
        if (config := self.evaluations_due.early_stopping) is None:
            return None
        from fivefold.run.early_stopping import watched

        return watched(config, self.comparable)

    @property
    def expert_sampler(self) -> EpochSampler[Any] | None:
        """Reads an expert's examples; None: there are none."""
        return None

    def evaluations(self, state: RunState) -> dict[str, Any]:
        """Return what the summary says about evaluations: what they measured before and after training."""
        evaluations = {"before": state.evaluation_before, "after": state.evaluation_last}
        return {
            f"{name}_{when}": values[name] if values else None
            for name in self.measured
            for when, values in evaluations.items()
        }

    def headline(self, state: RunState) -> str:
        """Return the title of the box at the end: the time, and the held-out data before and after training."""
        early = f"ended early, after step {state.step} of {self.total_steps}," if state.stopped_early else "finished"
        took = f"{early} in {state.seconds:.0f} s"
        found = held_out(state.evaluation_before or {}, state.evaluation_last or {})
        return f"{took}: {found.label} {found.before:.3f} -> {found.after:.3f}" if found else took


S = TypeVar("S", bound=RunSetup[Any])
Execute = Callable[[S, FromScratch | Resume, OpenRun, RunState, float], Steps[RunState]]
"""Starts the roles and runs the loop: called with the setup, where it starts, the open run, the state there, and the
time on `time.perf_counter` at which the command began. Returns the state after the last step."""


def run_whole(
    recipe: Recipe,
    columns: Sequence[Column],
    set_up: Callable[[datetime], S],
    execute: Execute[S],
    *,
    overwrite: bool,
    screen: ScreenKind,
) -> Steps[dict[str, Any]]:
    """Run a recipe to its last step, from its first one or from a checkpoint. Returns the content of `summary.json`.

    Args:
        recipe: the recipe.
        columns: columns of the table of steps.
        set_up: checks and loads everything that needs no worker; it gets the time of the run's first start.
        execute: runs the loop.
        overwrite: delete the results of an earlier run of the same name.
        screen: what the screen shows.

    Raises:
        ValueError: a recipe, a data set or a machine with which the run cannot start; nothing was trained.
        RunFailed: a worker failed, died or hung, or a checkpoint could not be written.
        RunStopped: the run was asked to end, and ended after a step.
    """
    began = time.perf_counter()
    try:
        start = find_start(recipe, overwrite=overwrite)
    except RecipeChangedError:
        # A recipe that could not run at all fails for that reason: the change may be of the same mistake.
        check_devices(recipe.scheduler, recipe.cluster)
        set_up(datetime.now(UTC))
        raise
    if isinstance(start, Finished):
        open_screen(screen, columns, PhaseTimers()).note(start.reason)
        return start.summary
    check_devices(recipe.scheduler, recipe.cluster)  # before the data are read, which may take long
    setup = set_up(start.began)
    if isinstance(start, Resume):
        setup = replace(setup, total_steps=start.state.last_step(recipe, setup.sampler.n_items))
    _check_profile(setup)
    setup.compared()
    state, note = state_at_start(recipe, start, setup.sampler, setup.ground, setup.total_steps, setup.expert_sampler)
    banner = {
        "model": setup.ground.describe_model(recipe),
        **{placed.role: describe(placed.layout) for placed in setup.ground.placement.roles},
        **setup.ground.kernels(recipe),
        **setup.facts(),
        **start_facts(start, note),
        "versions": ", ".join(f"{name} {number}" for name, number in versions().items()),
    }
    if warnings := [*setup.ground.warnings(recipe), *setup.warnings()]:
        banner["warnings"] = "\n".join(warnings)
    with open_run(recipe, start, columns, banner, setup.total_steps, screen) as run:
        state = yield from execute(setup, start, run, state, began)
        summary = {
            **setup.evaluations(state),
            "steps": state.step,
            **({"stopped_early": state.stopped_early} if state.stopped_early else {}),
            "seconds": round(state.seconds, 1),
            "versions": versions(),
            "recipe": resolved_yaml(recipe),
        }
        run.folder.write_summary(summary)
        if run.trackers is not None:
            run.trackers.summary(summary)
        run.screen.end(setup.headline(state), run.folder.saved())
    return summary


def _check_profile(setup: RunSetup[Any]) -> None:
    """Refuse to record a step that the run does not have.

    Raises:
        ValueError: as it says.
    """
    late = [step for step in setup.recipe.profile.steps if step > setup.total_steps]
    if late:
        raise ValueError(
            f"profile.steps has {late[0]}, but the last step of the run is {setup.total_steps}: name steps up to it"
        )
