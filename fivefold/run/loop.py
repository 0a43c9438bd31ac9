"""The loop of every command that trains, from the first step to the last: what it opens, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from fivefold.checkpoints.checkpointer import Checkpointer, TimeLimit
from fivefold.checkpoints.run_state import RunState
from fivefold.checkpoints.start import FromScratch, Resume
from fivefold.checkpoints.store import CheckpointStore
from fivefold.checkpoints.writer import CheckpointWriter, StateOwner
from fivefold.cluster.interrupt import EndRequest, ending_after_a_step
from fivefold.config.schema.recipe import Recipe
from fivefold.observe.json_records import records
from fivefold.observe.step_log import MetricsLog, SampleLog
from fivefold.roles.devices import Models
from fivefold.roles.trainer_worker import TrainerWorker
from fivefold.run.setup import OpenRun
from fivefold.run.state_owners import load_states
from fivefold.run.steps import Loop, Training, is_over
from fivefold.run.stepwise import Step, Steps
from fivefold.run.whole_run import RunSetup


def begin(start: FromScratch | Resume, models: Models, recipe: Recipe, run: OpenRun) -> None:
    """Load the states of a checkpoint into models that have their processes; the run has started then."""
    load_states(start, models, recipe, run.timers)
    engines = {
        name: model.trainer.group.call_first(TrainerWorker.effective_config) for name, model in models.trained.items()
    }
    run.folder.write_engines(engines)
    run.folder.started()


def run_steps(
    setup: RunSetup[Any],
    training: Training,
    models: Models,
    run: OpenRun,
    state: RunState,
    owners: Mapping[str, StateOwner],
    began: float,
) -> Steps[RunState]:
    """Run the steps after `state`, one at a time. Returns the state after the last one.

    Args:
        setup: the run as it is known before a process is started.
        training: what a step does.
        models: the models that are trained and saved.
        run: folder, screen and timers of the run.
        state: the state of the run before its next step.
        owners: whose state is saved, by the folder of a checkpoint that gets it.
        began: time on `time.perf_counter` at which the command was started.
    """
    with _loop(setup, training, models, run, state, owners, began) as loop:
        run.screen.start(setup.total_steps, state.step, records(run.folder.metrics))
        state = loop.begin(state)
        while not is_over(state):
            state, metrics = loop.step(state)
            try:
                yield Step(state.step, state.total_steps, dict(metrics))
            except GeneratorExit:
                loop.leave(state, metrics)
                raise
    return state


@contextmanager
def _loop(
    setup: RunSetup[Any],
    training: Training,
    models: Models,
    run: OpenRun,
    state: RunState,
    owners: Mapping[str, StateOwner],
    began: float,
) -> Iterator[Loop]:
    """Yield the loop. Inside the block, Ctrl-C and SIGTERM end the run after the step in progress.

    Without checkpoints they end it at once, because there is nothing to save.
    """
    recipe, folder = setup.recipe, run.folder
    config = recipe.recover
    tensorboard = folder.tensorboard if "tensorboard" in recipe.stats.trackers else None
    store = CheckpointStore(folder.checkpoints)
    writer = CheckpointWriter(recipe, store, owners, run.timers, run.screen.note, folder.is_ours)
    checkpoints = Checkpointer(writer, schedule=setup.schedule(config), history=state.kept_metric)
    with (
        MetricsLog(folder.metrics, tensorboard, run.trackers, first_step=state.step + 1) as metrics,
        SampleLog(folder.samples, folder.sample_parts, run.trackers) as samples,
        ending_after_a_step() if config.is_enabled else nullcontext(EndRequest()) as request,
        checkpoints,
    ):
        yield Loop(
            setup=setup,
            training=training,
            models=models,
            run=run,
            metrics=metrics,
            samples=samples,
            checkpoints=checkpoints,
            limit=TimeLimit(config.save_before if config.is_enabled else None, began=began),
            request=request,
            seconds_before=state.seconds,
            began=began,
            saver=setup.schedule(recipe.saver),
            evaluator=setup.schedule(setup.evaluations_due),
            judge=_judge(setup),
        )


def _judge(setup: RunSetup[Any]) -> Callable[[RunState], RunState] | None:
    """Return what compares an evaluation with the best one; None: the run does not end early."""
    config, metric = setup.evaluations_due.early_stopping, setup.compared()
    if config is None or metric is None:
        return None
    from fivefold.run.early_stopping import judged

    return partial(judged, config=config, metric=metric)
