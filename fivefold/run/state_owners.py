"""The states of models as checkpoints take them and give them back: what is off the devices returns for it.

a model that is trained          weights, optimizer state     TrainerWorker.snapshot, write_snapshot, load_state
a frozen one that follows it     weights                      TrainerWorker.snapshot_ema, write_ema, load_ema
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.checkpoints.start import FromScratch, Resume
from fivefold.checkpoints.store import TRAINER
from fivefold.checkpoints.writer import StateOwner
from fivefold.config.roles import roles_of
from fivefold.config.schema.recipe import Recipe
from fivefold.engine.contract import OFFLOADABLE, PARAMS, Offloadable
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.devices import Models
from fivefold.roles.ema import EMA
from fivefold.roles.models import ModelHandle
from fivefold.roles.snapshots import Snapshots, written

if TYPE_CHECKING:
    from fivefold.engine.state.dcp_files import WrittenPart


@dataclass(frozen=True)
class _Verbs:
    """The methods of a worker that move a kind of state, and the parts that it has."""

    take: Callable[..., Any]
    write: Callable[..., Any]
    load: Callable[..., Any]
    parts: tuple[Offloadable, ...]


_TRAINED = _Verbs(Snapshots.take, Snapshots.write, Snapshots.load, ("params", "optimizer"))
_FOLLOWING = _Verbs(EMA.take, EMA.write, EMA.load, PARAMS)


@dataclass(frozen=True)
class ModelState:
    """The state of a model that a checkpoint has."""

    model: ModelHandle
    verbs: _Verbs
    models: Models
    """All models of the run; some may have to make room."""
    timers: PhaseTimers

    def snapshot(self, folder: Path) -> None:
        """Copy the state to host memory, for `write_snapshot`.

        Raises:
            OSError: it is written at once (`TrainerSpec.copies_state`), and some rank could not write.
        """
        group = self.model.trainer.group
        with self.models.on_device(self.model, self.timers, *self.verbs.parts):
            written(group, group.call(self.verbs.take, folder))

    def write_snapshot(self) -> Sequence[WrittenPart]:
        """Write the files of the last snapshot, in parallel to whatever the processes do. Returns what each rank wrote.

        Raises:
            OSError: some rank could not write.
        """
        group = self.model.trainer.group
        return written(group, group.control(self.verbs.write))

    def load(self, folder: Path) -> None:
        """Load the state below `folder`, which may be of any layout."""
        with self.models.on_device(self.model, self.timers, *OFFLOADABLE):
            self.model.trainer.group.call(self.verbs.load, folder)


def state_owners(models: Models, recipe: Recipe, timers: PhaseTimers) -> dict[str, StateOwner]:
    """Return whose state a checkpoint has, by its folder."""
    return dict(_states(models, recipe, timers))


def load_states(start: FromScratch | Resume, models: Models, recipe: Recipe, timers: PhaseTimers) -> None:
    """Load the states that the checkpoint has from which the run continues.

    A run that continues from a checkpoint without a critic, which `recover.accept_changes` must allow, begins a new
    one; and a reference that begins to follow the actor begins with its first weights.
    """
    for folder, state in _states(models, recipe, timers).items():
        load_state(start, folder, state.load)


def load_state(start: FromScratch | Resume, folder: str, load: Callable[[Path], None]) -> None:
    """Load a state from `folder` of the checkpoint from which the run continues, if there is one."""
    if isinstance(start, Resume) and (folder == TRAINER or (start.checkpoint.path / folder).is_dir()):
        load(start.checkpoint.path / folder)


def _states(models: Models, recipe: Recipe, timers: PhaseTimers) -> dict[str, ModelState]:
    """Return the states that change, by their folder in a checkpoint."""
    rows = roles_of(recipe)
    states = {
        rows[name].spec.state: ModelState(model, _TRAINED, models, timers) for name, model in models.trained.items()
    }
    for name, model in models.frozen.items():
        if rows[name].section.follows is not None:
            states[rows[name].spec.state] = ModelState(model, _FOLLOWING, models, timers)
    return states
