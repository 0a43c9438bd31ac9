"""The start of every training command: model and layouts are checked, then folder, screen and machines opened."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.checkpoints.fingerprints import Fingerprints
from fivefold.checkpoints.start import FromScratch, Resume
from fivefold.cluster.session import Session
from fivefold.config.paths import resolve_model_path
from fivefold.config.roles import model_paths, roles_of
from fivefold.config.schema.recipe import Recipe
from fivefold.families.read import load_shape
from fivefold.families.shape import ModelShape
from fivefold.layout.placement import Placement, place
from fivefold.observe.columns import Column
from fivefold.observe.console import RunConsole
from fivefold.observe.earlier import build_seconds
from fivefold.observe.machine import about_run
from fivefold.observe.run_dir import RunDir
from fivefold.observe.screens import ScreenKind, open_screen
from fivefold.observe.timers import SUFFIX, EventLog, PhaseTimers
from fivefold.observe.trackers.background import Trackers, check_installed
from fivefold.roles.checks import check_tokenizers, check_weight_files
from fivefold.rollout.tokenizer import fix_date, tokenizer_of
from fivefold.rules.recipe import check_recipe
from fivefold.rules.unused import unused_keys
from fivefold.rules.unusual import unusual_values

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Groundwork:
    """A run's model and devices, as they are known before a process is started."""

    path: str
    """Folder or hub name of the actor's model."""
    shape: ModelShape
    placement: Placement
    tokenizer: PreTrainedTokenizerBase
    others: Mapping[str, ModelShape]
    """Shapes of the separate models of roles besides the actor, by role."""

    def describe_model(self, recipe: Recipe) -> str:
        """Return a description of the model in one line."""
        return f"{recipe.actor.path} ({self.shape.family}, {self.shape.n_parameters / 1e6:,.1f} M parameters)"

    def kernels(self, recipe: Recipe) -> Mapping[str, str]:
        """Return what the banner says of kernels that depend on what is installed."""
        delta = self.shape.delta
        if delta is None or self.placement.is_cpu:
            return {}
        # Imported here, because other models need no such kernels.
        from fivefold.families.fla_core import described

        widths = delta.key_dim, delta.value_dim
        return {"delta nets": described(recipe.actor.dtype, widths, deterministic=recipe.actor.is_deterministic)}

    def fingerprints(self, recipe: Recipe) -> Fingerprints:
        """Return the fingerprints of the model and the tokenizer."""
        tokenizer = resolve_model_path(recipe.tokenizer_path or self.path)
        return Fingerprints.of(
            resolve_model_folder(self.path),
            resolve_model_folder(tokenizer),
            from_scratch=recipe.actor.init_from_scratch,
        )

    def warnings(self, recipe: Recipe) -> list[str]:
        """Return lines about unused devices, keys without effect and odd values."""
        return [*self.placement.warnings(), *unused_keys(recipe, self.shape), *unusual_values(recipe)]


def lay_groundwork(recipe: Recipe, began: datetime | None = None) -> Groundwork:
    """Find and check the models with their weight files, the layouts and the tokenizer.

    Args:
        recipe: the recipe.
        began: time of the run's first start; None: now.

    Raises:
        ValueError: a model that is missing or not supported, weight files that are broken or of another model, layouts
            that do not fit the model or the cluster, or no usable tokenizer.
    """
    check_installed(recipe.stats.trackers)
    path = resolve_model_path(recipe.actor.path)
    shape = load_shape(resolve_model_folder(path))
    placement = place(recipe)
    others = {role: load_shape(resolve_model_folder(other)) for role, other in model_paths(recipe).items()}
    check_recipe(recipe, shape, others)
    roles = roles_of(recipe).values()
    check_weight_files(recipe, roles)
    tokenizer = tokenizer_of(recipe, path)
    check_tokenizers(recipe, roles, shape, tokenizer)
    fix_date(tokenizer, began or datetime.now(UTC))
    return Groundwork(path, shape, placement, tokenizer, others)


@dataclass(frozen=True)
class OpenRun:
    """The folder, the screen, the timers and the machines of a run."""

    folder: RunDir
    screen: RunConsole
    timers: PhaseTimers
    session: Session
    events: EventLog | None = None
    """Records the phases and the ends of the steps; None: nothing is recorded."""
    trackers: Trackers | None = None

    def say_ready(self, began: float) -> None:
        """Print how long the start took, a command that began at `began` on `time.perf_counter`, and each role's."""
        roles = ", ".join(f"{role} {seconds:.1f} s" for role, seconds in self.session.build_seconds.items())
        self.screen.note(f"ready after {time.perf_counter() - began:.1f} s: {roles}")


@contextmanager
def open_run(
    recipe: Recipe,
    start: FromScratch | Resume,
    columns: Sequence[Column],
    banner: Mapping[str, object],
    total_steps: int,
    screen_kind: ScreenKind = "table",
) -> Iterator[OpenRun]:
    """Open the run's folder, its screen and its machines. However the block ends, it leaves no process of the run.

    Args:
        recipe: the recipe of the run.
        start: where the run starts.
        columns: columns of the table of steps.
        banner: facts about the run, which the screen shows before it starts.
        total_steps: steps of the whole run.
        screen_kind: what the screen shows.

    Raises:
        ValueError: the folder holds another run, or the machines lack devices that the recipe asks for.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(start.open_folder(recipe))
        events = stack.enter_context(closing(EventLog(folder.logs / f"driver{SUFFIX}", names_threads=True)))
        timers = PhaseTimers(events)
        screen = stack.enter_context(open_screen(screen_kind, columns, timers))
        title = f"{recipe.experiment_name} / {recipe.trial_name}"
        folder.write_about(about_run(title, banner, total_steps))
        screen.banner(title, banner)
        session = stack.enter_context(Session.open(recipe.scheduler, recipe.cluster, folder.logs, timers))
        screen.follow(session.progress, build_seconds(folder.path))
        if (trackers := Trackers.open(recipe, folder, screen.note)) is not None:
            stack.enter_context(closing(trackers))
        yield OpenRun(folder, screen, timers, session, events, trackers)
