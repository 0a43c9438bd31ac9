"""Roles that take turns on the same GPUs: what each of them keeps there while another one works."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fivefold.config.roles import ROLES
from fivefold.config.schema.role import Offloadable
from fivefold.layout.backends import BACKENDS
from fivefold.layout.placement import Placement
from fivefold.planning.estimates import ModelEstimate
from fivefold.planning.inputs import Inputs, must_leave
from fivefold.planning.rollout_memory import asleep_bytes
from fivefold.planning.sending import served_bytes


@dataclass(frozen=True)
class Sharing:
    """What roles keep on their GPUs."""

    inputs: Inputs
    placement: Placement
    models: Mapping[str, ModelEstimate]
    offloaded: tuple[Offloadable, ...] = ()
    """What the actor moves off its GPUs for a rollout."""
    streams_frozen: bool = False
    """Whether weights that the actor does not train go to a rollout from host memory."""

    def others(self, worker: str) -> int:
        """Return the bytes that all other roles keep on the GPUs of a role while it works."""
        return sum(self.kept(role, worker) for role in self.placement.sharers(worker))

    def kept(self, role: str, worker: str) -> int:
        """Return the bytes that a role keeps on its GPUs while `worker` works there."""
        if ROLES[role].generates:
            return self.asleep(role)
        model = self.models[role]
        if ROLES[role].scores_samples and ROLES[worker].generates:
            return model.binding.total  # it scores while the rollout is awake
        return model.kept(self._actor_offloads_for(worker) if role == "actor" else model.offloaded)

    def asleep(self, role: str) -> int:
        """Return the bytes that a role that generates keeps while it sleeps."""
        if not self.inputs.on_gpus:
            return 0
        layout = self.placement[role].layout
        is_adapted = role == "rollout" and BACKENDS[layout.backend].keeps_adapters
        return asleep_bytes(layout) + (served_bytes(self.inputs, layout) if is_adapted else 0)

    def _actor_offloads_for(self, worker: str) -> Collection[Offloadable]:
        """Return what the actor offloads while another role works."""
        if ROLES[worker].generates or ROLES[worker].scores_samples:
            return self.offloaded  # it waits for the rollout, and samples are scored meanwhile
        if self.inputs.models[worker].trains:
            return self.offloaded or must_leave(self.inputs.actor.leaves)
        return ()
