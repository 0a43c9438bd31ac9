"""The states of roles as checkpoints take them and give them back: what is offloaded comes back for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.checkpoints.start import FromScratch, Resume
from fivefold.checkpoints.writer import StateOwner
from fivefold.config.roles import roles_of
from fivefold.config.schema.recipe import Recipe
from fivefold.engine.contract import OFFLOADABLE
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.devices import Models
from fivefold.roles.frozen import FrozenModel
from fivefold.roles.models import TrainedModel
from fivefold.run.resume import load_state

if TYPE_CHECKING:
    from fivefold.engine.state.dcp_files import WrittenPart


@dataclass(frozen=True)
class OffloadedState:
    """The state of a role that may be off its devices."""

    role: StateOwner
    on_device: Callable[[], AbstractContextManager[None]]
    """Has the state on the devices inside the block."""

    def snapshot(self, folder: Path) -> None:
        """Copy the state to host memory, for `write_snapshot`."""
        with self.on_device():
            self.role.snapshot(folder)

    def write_snapshot(self) -> Sequence[WrittenPart]:
        """Write the files of the last snapshot, as `StateOwner` says."""
        return self.role.write_snapshot()


def state_owners(models: Models, recipe: Recipe, timers: PhaseTimers) -> dict[str, StateOwner]:
    """Return whose state a checkpoint has, by its folder."""
    return {
        folder: OffloadedState(model, partial(models.on_device, model, timers, *model.kept))
        for folder, model in _changing(models, recipe).items()
    }


def load_states(start: FromScratch | Resume, models: Models, recipe: Recipe, timers: PhaseTimers) -> None:
    """Load the states of all roles that the checkpoint has from which the run continues."""
    for folder, model in _changing(models, recipe).items():
        with models.on_device(model, timers, *OFFLOADABLE):
            load_state(start, folder, model)


def _changing(models: Models, recipe: Recipe) -> dict[str, TrainedModel | FrozenModel]:
    """Return the models that are trained or follow one that is, by their folder in a checkpoint."""
    roles, frozen = roles_of(recipe), models.frozen.items()
    following = {name: model for name, model in frozen if roles[name].section.follows is not None}
    changing: dict[str, TrainedModel | FrozenModel] = {**models.trained, **following}
    return {roles[name].spec.state: model for name, model in changing.items()}
