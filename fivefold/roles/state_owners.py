"""The states of roles as checkpoints take them: what is offloaded comes back for the copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.checkpoints.store import CRITIC, REFERENCE, TRAINER
from fivefold.checkpoints.writer import StateOwner
from fivefold.config.schema.train import TrainRecipe
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.critic import Critic
from fivefold.roles.reference import Reference
from fivefold.roles.run_roles import Roles

if TYPE_CHECKING:
    from fivefold.engine.state_store import WrittenPart


@dataclass(frozen=True)
class ActorState:
    """The actor's state."""

    roles: Roles
    timers: PhaseTimers

    def snapshot(self, folder: Path) -> int:
        """Copy the state to host memory, for `write_snapshot`. Returns the bytes of all ranks."""
        with self.roles.on_device(self.timers, "params", "optimizer"):
            return self.roles.actor.snapshot(folder)

    def write_snapshot(self) -> list[WrittenPart]:
        """Write the files of the last snapshot; see `Actor.write_snapshot`."""
        return self.roles.actor.write_snapshot()


@dataclass(frozen=True)
class ReferenceState:
    """The weights of a reference that follows the actor, as checkpoints take them."""

    roles: Roles
    reference: Reference
    timers: PhaseTimers

    def snapshot(self, folder: Path) -> int:
        """Copy the weights to host memory, for `write_snapshot`. Returns the bytes of all ranks."""
        with self.roles.on_device(self.timers, "params"):
            return self.reference.snapshot(folder)

    def write_snapshot(self) -> Sequence[WrittenPart]:
        """Write the files of the last snapshot; see `Reference.write_snapshot`."""
        return self.reference.write_snapshot()


@dataclass(frozen=True)
class CriticState:
    """The critic's state as checkpoints take it, like `ActorState`."""

    roles: Roles
    critic: Critic
    timers: PhaseTimers

    def snapshot(self, folder: Path) -> int:
        """Copy the state to host memory, for `write_snapshot`. Returns the bytes of all ranks."""
        with self.roles.critic_on_device(self.timers, "params", "optimizer"):
            return self.critic.snapshot(folder)

    def write_snapshot(self) -> list[WrittenPart]:
        """Write the files of the last snapshot; see `TrainedRole.write_snapshot`."""
        return self.critic.write_snapshot()


def state_owners(roles: Roles, recipe: TrainRecipe, timers: PhaseTimers) -> dict[str, StateOwner]:
    """Return whose state a checkpoint has, by its folder."""
    owners: dict[str, StateOwner] = {TRAINER: ActorState(roles, timers)}
    if roles.reference is not None and recipe.ref.refresh_steps is not None:
        owners[REFERENCE] = ReferenceState(roles, roles.reference, timers)
    if roles.critic is not None:
        owners[CRITIC] = CriticState(roles, roles.critic, timers)
    return owners
