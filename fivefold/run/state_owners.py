"""The states of roles as checkpoints take them: what is offloaded comes back for the copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.checkpoints.store import CRITIC, REFERENCE, TRAINER
from fivefold.checkpoints.writer import StateOwner
from fivefold.config.schema.train import TrainRecipe
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.run_roles import Roles

if TYPE_CHECKING:
    from fivefold.engine.state.state_store import WrittenPart


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


def state_owners(roles: Roles, recipe: TrainRecipe, timers: PhaseTimers) -> dict[str, StateOwner]:
    """Return whose state a checkpoint has, by its folder."""
    owners: dict[str, StateOwner] = {
        TRAINER: OffloadedState(roles.actor, partial(roles.on_device, timers, "params", "optimizer")),
    }
    if roles.reference is not None and recipe.ref.refresh_steps is not None:
        owners[REFERENCE] = OffloadedState(roles.reference, partial(roles.on_device, timers, "params"))
    if roles.critic is not None:
        owners[CRITIC] = OffloadedState(roles.critic, partial(roles.critic_on_device, timers, "params", "optimizer"))
    return owners
