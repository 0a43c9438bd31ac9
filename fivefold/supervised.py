"""The loop of supervised training, which `fivefold sft`, `fivefold dpo` and `fivefold rm` share.

examples of a step ──Method.update──> one optimizer step ──> metrics, checkpoint, next step
held-out examples  ──Method.measure──> before the first step, now and then, and after the last one
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from fivefold.algorithms.metrics import metric_values
from fivefold.algorithms.preferences import Objective
from fivefold.batch import Columns
from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.bridge.kept import check_tower
from fivefold.checkpoints.run_state import RunState
from fivefold.checkpoints.start import FromScratch, Resume
from fivefold.config.schema.data import PreferenceRowsConfig
from fivefold.config.schema.preferences import DPORecipe, RMRecipe
from fivefold.config.schema.run import EvaluationsConfig
from fivefold.config.schema.sft import SFTRecipe
from fivefold.data.examples import Example, Examples
from fivefold.data.preferences import Pair, load_pairs
from fivefold.data.rows import dropped_rows, held_out_usage
from fivefold.data.sft import SFTExample
from fivefold.observe.columns import PAIR_COLUMNS, Column
from fivefold.observe.screens import ScreenKind
from fivefold.observe.step_log import SampleLog
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.devices import Models
from fivefold.roles.launch import launch_models
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.trainer_worker import UpdateResult
from fivefold.rules.models import check_examples
from fivefold.rules.vision import image_keys
from fivefold.run.loop import begin, run_steps
from fivefold.run.profiling import recorder
from fivefold.run.setup import Groundwork, OpenRun, lay_groundwork
from fivefold.run.speed import StepSpeed, Worked
from fivefold.run.state_owners import state_owners
from fivefold.run.steps import StepDone
from fivefold.run.stepwise import Steps
from fivefold.run.whole_run import RunSetup, run_whole
from fivefold.update.preferences import Comparison, Scoring
from fivefold.update.step import Skips

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fivefold.families.shape import ModelShape

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
    """What sets one kind of supervised training apart: data, loss and evaluation."""

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

    @property
    def n_compared(self) -> int:
        """Examples that one evaluation needs at least."""

    def load(self, rows: Any, tokenizer: PreTrainedTokenizerBase, model: tuple[str, ModelShape]) -> Examples[Item]:
        """Read the examples of a section of the recipe, to train on or held-out ones.

        Args:
            rows: the section.
            tokenizer: the model's tokenizer.
            model: folder or hub name of the model, and its shape, for which images are read.

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

    n_compared = 1
    columns = PAIR_COLUMNS
    unit = "pairs"
    measured = ("accuracy", "loss", "margin")

    def load(
        self, rows: PreferenceRowsConfig, tokenizer: PreTrainedTokenizerBase, model: tuple[str, ModelShape]
    ) -> Examples[Pair]:
        """Read pairs."""
        return load_pairs(rows, tokenizer, model)

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

    def warnings(self) -> Iterator[str]:
        """Yield what is odd about the data."""
        yield from dropped_rows("train_dataset", self.data.n_rows, self.data.n_too_long)
        if self.valid is not None:
            yield from dropped_rows(_section_of_held_out(self.recipe), self.valid.n_rows, self.valid.n_too_long)

    @property
    def measured(self) -> tuple[str, ...]:
        """Names of what evaluations measure and the summary has."""
        return self.method.measured

    @property
    def evaluations_due(self) -> EvaluationsConfig:
        """When held-out examples are evaluated."""
        return self.recipe.evaluator


def _section_of_held_out(recipe: SupervisedRecipe) -> str:
    return "train_dataset" if recipe.valid_dataset is None else "valid_dataset"


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
    data, valid = _load(recipe, method, ground)
    if image_keys(recipe):
        check_tower(resolve_model_folder(ground.path))
    for section, examples in (("train_dataset", data), (_section_of_held_out(recipe), valid)):
        if examples is not None:
            check_examples(ground.shape, section, examples.longest, examples.largest_token, method.n_appended)
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


def _load(
    recipe: SupervisedRecipe, method: Method[Item], ground: Groundwork
) -> tuple[Examples[Item], Examples[Item] | None]:
    """Read the examples to train on, and the held-out ones if there are any.

    Raises:
        ValueError: a data set that cannot be used, or fewer held-out examples than an evaluation needs.
    """
    model = ground.path, ground.shape
    data, valid = method.load(recipe.train_dataset, ground.tokenizer, model), None
    if hold_out := recipe.train_dataset.hold_out:
        data, valid = data.held_apart(hold_out, recipe.seed)
    elif recipe.valid_dataset is not None:
        valid = method.load(recipe.valid_dataset, ground.tokenizer, model)
    if valid is not None and len(valid) < method.n_compared:
        raise ValueError(
            f"each held-out one of the {method.unit} is compared with another one, and {_section_of_held_out(recipe)} "
            f"has {len(valid)} ({valid.usage}): hold out more, or none"
        )
    return data, valid


def run_supervised(
    recipe: SupervisedRecipe, method: Method[Item], *, overwrite: bool, screen: ScreenKind
) -> Steps[dict[str, Any]]:
    """Run `recipe`, as `run_whole` says. Returns the content of `summary.json`."""
    return run_whole(
        recipe, method.columns, partial(set_up, recipe, method), _execute, overwrite=overwrite, screen=screen
    )


def _execute(
    setup: Setup[Item], start: FromScratch | Resume, run: OpenRun, state: RunState, began: float
) -> Steps[RunState]:
    """Start the models, with the state of a checkpoint, and run the loop."""
    models = launch_models(run.session, setup.recipe, setup.ground.placement, setup.total_steps)
    begin(start, models, setup.recipe, run)
    run.say_ready(began)
    return (yield from run_loop(setup, models, run, state, began))


def run_loop(setup: Setup[Item], models: Models, run: OpenRun, state: RunState, began: float) -> Steps[RunState]:
    """Run the steps after `state`. Returns the state after the last one."""
    owners = state_owners(models, setup.recipe, run.timers)
    return run_steps(setup, Supervised(setup, models, run), models, run, state, owners, began)


class Supervised(Generic[Item]):
    """The steps of supervised training."""

    def __init__(self, setup: Setup[Item], models: Models, run: OpenRun) -> None:
        """Take the models, which have their processes."""
        self._setup, self._models, self._run = setup, models, run
        self._speed = StepSpeed.of(setup.recipe, setup.ground, models, run.screen.note)
        self._recorded = recorder(setup.recipe.profile, run.folder.profile, models.trained)

    def begin(self, state: RunState) -> None:
        """Do nothing: a step needs no other."""

    def step(self, state: RunState, samples: SampleLog) -> StepDone:
        """Make one optimizer step on the next examples."""
        began, step, timers = time.perf_counter(), state.step + 1, self._run.timers
        with self._recorded(step):
            learnt = self._setup.method.update(self._models, self._setup.sampler.next_batch(), timers)
        seconds, whole = timers.take(), time.perf_counter() - began
        skips = Skips(in_a_row=state.skips_in_a_row).after(learnt.result, step)
        metrics = metric_values(learnt.result.metrics)
        metrics["tokens_per_second"] = learnt.trained.n_tokens / seconds["train"]
        metrics |= self._speed.metrics(Worked(learnt.trained, learnt.scored), seconds)
        position = self._setup.sampler.state_dict()
        state = replace(state, step=step, sampler=position, weight_version=step, skips_in_a_row=skips.in_a_row)
        return StepDone(state, metrics, seconds, whole, problem=skips.problem)

    def evaluate(self, step: int) -> dict[str, float] | None:
        """Evaluate the held-out examples; None if there are none."""
        setup = self._setup
        if setup.valid is None:
            return None
        with self._run.timers.phase("evaluation"):
            measures = setup.method.measure(self._models, setup.valid.examples)
        when = (
            "before training" if not step else "after training" if step == setup.total_steps else f"after step {step}"
        )
        found = setup.method.told(measures)
        self._run.screen.note(f"held-out {found} {when}, on {len(setup.valid):,} {setup.method.unit}", style="cyan")
        return {name: measures[name] for name in setup.method.measured}

    def take_news(self) -> str | None:
        """Return nothing: nothing happens between steps."""
        return None
