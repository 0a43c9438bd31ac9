"""The loop of supervised training, which `fivefold sft`, `fivefold dpo` and `fivefold rm` share.

examples of a step ──Method.update──> one optimizer step ──> metrics, checkpoint, next step
held-out examples  ──Method.measure──> before the first step, and after the last one
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fivefold.algorithms.metrics import metric_values
from fivefold.algorithms.preferences import Objective
from fivefold.checkpoints.run_state import RunState
from fivefold.checkpoints.start import FromScratch, Resume
from fivefold.checkpoints.weights import WeightSaver
from fivefold.config.schema.preferences import DPORecipe, RMRecipe
from fivefold.config.schema.sft import SFTRecipe
from fivefold.data.examples import Example, Examples
from fivefold.data.preferences import Pair, load_pairs
from fivefold.data.rows import held_out_usage
from fivefold.data.sft import SFTExample
from fivefold.observe.columns import PAIR_COLUMNS, Column
from fivefold.observe.errors import RunFailed
from fivefold.observe.jsonl import records
from fivefold.observe.screens import ScreenKind
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.devices import Models
from fivefold.roles.launch import launch_models
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.trainer_worker import UpdateResult
from fivefold.rules.models import check_examples
from fivefold.run.keeper import keep
from fivefold.run.profiling import StepProfiler
from fivefold.run.setup import OpenRun, lay_groundwork
from fivefold.run.speed import SupervisedSpeed, known_peak
from fivefold.run.state_owners import load_states, state_owners
from fivefold.run.whole_run import RunSetup, run_whole
from fivefold.types import Columns
from fivefold.update.preferences import Comparison, Scoring
from fivefold.update.updates import SkipGuard

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item", bound=Example)
SupervisedRecipe = SFTRecipe | DPORecipe | RMRecipe


@dataclass(frozen=True)
class Learnt:
    """What a step came to."""

    result: UpdateResult
    trained: RemoteBatch
    """Sequences that were trained on."""
    scored: RemoteBatch
    """Sequences that were scored without gradient, in methods that do so."""


class Method(Protocol[Item]):
    """What one kind of supervised training has of its own: data, loss and evaluation."""

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns of the table of steps."""

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of what `measure` returns and the summary has."""

    @property
    def unit(self) -> str:
        """What an example is, in the plural."""

    @property
    def n_appended(self) -> int:
        """Tokens that are appended to every example."""

    def load(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Examples[Item], Examples[Item] | None]:
        """Read the examples to train on, and the held-out ones if there are any.

        Raises:
            ValueError: a data set that cannot be used.
        """

    def update(self, models: Models, examples: Sequence[Item], timers: PhaseTimers) -> Learnt:
        """Make one optimizer step on the examples of a batch, in the phase `train`."""

    def measure(self, models: Models, examples: Sequence[Item]) -> dict[str, float]:
        """Evaluate the current weights on held-out examples."""

    def told(self, measures: Mapping[str, float]) -> str:
        """Return what `measure` returned as a text for the user."""


@dataclass(frozen=True)
class PairMethod:
    """The method on pairs of a chosen and a rejected answer, whose scores an objective compares."""

    recipe: DPORecipe | RMRecipe
    scoring: Scoring
    objective: Objective
    lay_out: Callable[[Sequence[SFTExample]], Columns]
    """Lays answers end to end."""
    n_appended: int = 0

    columns = PAIR_COLUMNS
    unit = "pairs"
    measured = ("accuracy", "loss", "margin")

    def load(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Examples[Pair], Examples[Pair] | None]:
        """Read pairs."""
        valid = self.recipe.valid_dataset
        return load_pairs(self.recipe.train_dataset, tokenizer), None if valid is None else load_pairs(valid, tokenizer)

    def update(self, models: Models, examples: Sequence[Pair], timers: PhaseTimers) -> Learnt:
        """Make one optimizer step on pairs."""
        comparison = self._comparison(examples)
        result = self.scoring.update(models, comparison, timers)
        return Learnt(result, trained=comparison.trained, scored=comparison.batch)

    def measure(self, models: Models, examples: Sequence[Pair]) -> dict[str, float]:
        """Return the metrics of the loss."""
        return self.scoring.measure(models, self._comparison(examples))

    def told(self, measures: Mapping[str, float]) -> str:
        """Return the accuracy and the margin as a text."""
        return f"accuracy {measures['accuracy']:.3f}, margin {measures['margin']:z.3f}"

    def _comparison(self, pairs: Sequence[Pair]) -> Comparison:
        batch = RemoteBatch.of(self.lay_out([answer for pair in pairs for answer in (pair.chosen, pair.rejected)]))
        return Comparison(batch, self.objective, n_trained=len(batch))


@dataclass(frozen=True)
class Setup(RunSetup[Item]):
    """A run of supervised training as it is known before a process is started."""

    recipe: SupervisedRecipe
    method: Method[Item]
    data: Examples[Item]
    valid: Examples[Item] | None

    def facts(self) -> Mapping[str, object]:
        """Return what the banner says about this kind of run."""
        left_over = self.sampler.n_dropped
        unused = f"; {left_over} {self.method.unit} of each epoch fill no step" if left_over else ""
        return {
            self.method.unit: self.data.usage,
            **(
                {"held out": held_out_usage(self.valid.usage, _tokens(self.valid), _tokens(self.data))}
                if self.valid
                else {}
            ),
            "steps": f"{self.total_steps} of {self.recipe.train_dataset.batch_size} {self.method.unit}{unused}",
        }

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of what evaluations measure and the summary has."""
        return self.method.measured


def _tokens(data: Examples[Item]) -> Iterator[tuple[tuple[int, ...], ...]]:
    return (tuple(example.parts()) for example in data.examples)


def set_up(recipe: SupervisedRecipe, method: Method[Item], began: datetime | None = None) -> Setup[Item]:
    """Check and load everything that needs no worker.

    Args:
        recipe: the recipe.
        method: the kind of training.
        began: time of the run's first start; None: now.

    Raises:
        ValueError: a recipe, a model or a data set that cannot work.
    """
    ground = lay_groundwork(recipe, began)
    data, valid = method.load(ground.tokenizer)
    check_examples(ground.shape, "train_dataset", data.longest, data.largest_token, method.n_appended)
    if valid is not None:
        check_examples(ground.shape, "valid_dataset", valid.longest, valid.largest_token, method.n_appended)
    sampler = data.sampler(recipe.train_dataset, recipe.seed)
    total_steps = recipe.n_steps(sampler.batches_per_epoch)
    return Setup(
        recipe=recipe,
        ground=ground,
        sampler=sampler,
        total_steps=total_steps,
        method=method,
        data=data,
        valid=valid,
    )


def run_supervised(
    recipe: SupervisedRecipe, method: Method[Item], *, overwrite: bool, screen: ScreenKind
) -> dict[str, Any]:
    """Run `recipe`, as `run_whole` says. Returns the content of `summary.json`."""
    return run_whole(
        recipe, method.columns, partial(set_up, recipe, method), _execute, overwrite=overwrite, screen=screen
    )


def _execute(setup: Setup[Item], start: FromScratch | Resume, run: OpenRun, state: RunState, began: float) -> RunState:
    """Start the models, with the state of a checkpoint, and run the loop."""
    ground = setup.ground
    models = launch_models(run.session, setup.recipe, ground.placement, setup.total_steps)
    load_states(start, models, setup.recipe, run.timers)
    run.folder.write_engines({"actor": models.actor.effective_config()})
    run.folder.started()
    return run_loop(setup, models, run, state, began)


def run_loop(setup: Setup[Item], models: Models, run: OpenRun, state: RunState, began: float) -> RunState:
    """Run the training loop from `state` on. Returns the state after its last step."""
    recipe, method, timers, actor = setup.recipe, setup.method, run.timers, models.actor
    saver, weights = setup.schedule(recipe.saver), WeightSaver(recipe.saver, run.folder.weights, actor.save)
    profiler = StepProfiler(recipe.profile, run.folder.profile, {"actor": actor})
    peak = known_peak(recipe.cluster, actor.device_names(), run.screen.note)
    ground = setup.ground
    speed = SupervisedSpeed(recipe, ground.placement, ground.shape, ground.others, peak)
    guard = SkipGuard()
    guard.in_a_row = state.skips_in_a_row
    with keep(
        run, recipe, state_owners(models, recipe, timers), state, setup.schedule(recipe.recover), began
    ) as keeper:
        run.screen.start(setup.total_steps, state.step, records(run.folder.metrics))
        if state.step == 0:
            state = replace(state, evaluation_before=_held_out(setup, models, run, "before training"))
        timers.take()
        for step in range(state.step + 1, setup.total_steps + 1):
            step_began = time.perf_counter()
            with profiler.step(step):
                learnt = method.update(models, setup.sampler.next_batch(), timers)
            guard.count(learnt.result, step)
            seconds = timers.take()
            metrics = metric_values(learnt.result.metrics) | speed.metrics(learnt.trained, learnt.scored, seconds)
            metrics["seconds/step"] = time.perf_counter() - step_began
            if guard.problem is not None:
                keeper.metrics.write(step, metrics | {f"seconds/{phase}": value for phase, value in seconds.items()})
                raise RunFailed(guard.problem)
            state = replace(
                state, step=step, sampler=setup.sampler.state_dict(), weight_version=step, skips_in_a_row=guard.in_a_row
            )
            try:
                if saver.is_due(step):
                    with timers.phase("save"):
                        weights.save(step)
                    saver.done()
                if step == setup.total_steps:
                    state = replace(state, evaluation_last=_held_out(setup, models, run, "after training"))
                    if state.evaluation_last is not None:
                        metrics |= {f"eval/{name}": state.evaluation_last[name] for name in method.measured}
                state = keeper.after_step(state, metrics)
            finally:
                seconds |= timers.take()
                keeper.metrics.write(step, metrics | {f"seconds/{phase}": value for phase, value in seconds.items()})
            run.screen.step(step, metrics, seconds)
            keeper.step_logged(state)
    return state


def _held_out(setup: Setup[Item], models: Models, run: OpenRun, when: str) -> dict[str, float] | None:
    """Evaluate the held-out examples; None if there are none."""
    if setup.valid is None:
        return None
    with run.timers.phase("evaluation"):
        measures = setup.method.measure(models, setup.valid.examples)
    n = len(setup.valid)
    run.screen.note(f"held-out {setup.method.told(measures)} {when}, on {n:,} {setup.method.unit}", style="cyan")
    return measures
