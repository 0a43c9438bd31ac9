"""How every training command begins: the model is found and checked, then folder, screen and machines are opened."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.cluster.session import Session
from fivefold.config.paths import resolve_model_path
from fivefold.config.schema import Recipe, TrainRecipe
from fivefold.families.check import check_recipe
from fivefold.families.read import load_shape
from fivefold.families.shape import ModelShape
from fivefold.families.unused_keys import unused_keys
from fivefold.layout.placement import Placement, place
from fivefold.observe.console import RunConsole
from fivefold.observe.run_dir import RunDir
from fivefold.observe.table import Column
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.launch import check_engines
from fivefold.rollout.hf_model import load_tokenizer


@dataclass(frozen=True)
class Groundwork:
    """What every run knows of its model and its devices before a process is started."""

    path: str
    """The actor's model, folder or hub name."""
    shape: ModelShape
    placement: Placement
    tokenizer: PreTrainedTokenizerBase

    def describe_model(self, recipe: Recipe) -> str:
        """The model in a line, for people."""
        return f"{recipe.actor.path} ({self.shape.family}, {self.shape.n_parameters / 1e6:,.1f} M parameters)"

    def warnings(self, recipe: Recipe) -> dict[str, object]:
        """What would run, but wastes devices or is a key without effect: an entry of the banner, if there is any."""
        lines = [*self.placement.warnings(), *unused_keys(recipe, self.shape)]
        return {"warnings": "\n".join(lines)} if lines else {}


def lay_groundwork(recipe: Recipe) -> Groundwork:
    """Find and check the model, the layouts and the tokenizer.

    Raises:
        ValueError: a model that is not there or not supported, layouts that do not fit it or the cluster, an engine
            that does not run, or no usable tokenizer.
    """
    path = resolve_model_path(recipe.actor.path)
    shape = load_shape(resolve_model_folder(path))
    placement = place(recipe)
    check_engines(placement)
    check_recipe(recipe, shape, _reference_shape(recipe, shape) if isinstance(recipe, TrainRecipe) else None)
    tokenizer = load_tokenizer(resolve_model_path(recipe.tokenizer_path or path))
    return Groundwork(path, shape, placement, tokenizer)


def _reference_shape(recipe: TrainRecipe, shape: ModelShape) -> ModelShape | None:
    """Shape of a reference model that is not the actor's."""
    if recipe.ref.path is None:
        return None
    reference = load_shape(resolve_model_folder(recipe.ref.path))
    if reference.vocab != shape.vocab:
        raise ValueError(
            f"ref.path={recipe.ref.path} has {reference.vocab} tokens in its vocabulary, the actor {shape.vocab}: "
            "a KL divergence needs the same ones"
        )
    return reference


@dataclass(frozen=True)
class OpenRun:
    """What a run writes to and runs on, for as long as it lasts."""

    folder: RunDir
    screen: RunConsole
    timers: PhaseTimers
    session: Session


@contextmanager
def open_run(
    recipe: Recipe, columns: Sequence[Column], banner: Mapping[str, object], *, overwrite: bool
) -> Iterator[OpenRun]:
    """The run's folder, its screen, and its machines. However the block is left, no process of the run is left behind.

    Args:
        columns: what the table of steps shows.
        banner: what the screen says of the run before it starts.
        overwrite: whether the results of an earlier run of the same name are deleted.

    Raises:
        ValueError: the folder holds another run, or the machines do not have what the recipe asks for.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(RunDir.create(recipe, overwrite=overwrite))
        screen = stack.enter_context(RunConsole(columns))
        timers = PhaseTimers(on_change=screen.phase)
        screen.banner(f"{recipe.experiment_name} / {recipe.trial_name}", banner)
        session = stack.enter_context(Session.open(recipe.scheduler, recipe.cluster, folder.logs, timers))
        yield OpenRun(folder, screen, timers, session)
