"""The question that a plan answers: a model, roles on a cluster, and the work of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fivefold.families.shape import ModelShape
from fivefold.layout.allocation import Allocation
from fivefold.layout.devices import device_text
from fivefold.layout.gpus import Gpu
from fivefold.layout.placement import Placement, place_allocation, place_by_list
from fivefold.planning.memory import KINDS, Kind
from fivefold.planning.offload_choice import KEEP_ALL, OffloadChoice
from fivefold.planning.workload import Workload


@dataclass(frozen=True)
class CriticQuestion:
    """A critic beside the actor."""

    shape: ModelShape
    """The model, with its value head."""
    work: Workload
    """The work of one of its optimizer steps."""
    offload: OffloadChoice
    """What it moves off its GPUs while it does not work; None: everything, if it shares them."""

    def offloaded(self, *, shares: bool) -> tuple[Kind, ...]:
        """Return what the critic moves off its GPUs; `shares`: whether other roles work there."""
        choice = {kind: getattr(self.offload, kind) for kind in KINDS}
        return tuple(kind for kind, is_wanted in choice.items() if (shares if is_wanted is None else is_wanted))


@dataclass(frozen=True)
class FrozenQuestion:
    """A model that is not trained, in processes of its own."""

    shape: ModelShape
    work: Workload
    """Its longest sequences and its micro-batches."""
    offload: bool | None
    """Whether its weights leave its GPUs while it does not work; None: if it shares them."""

    def offloaded(self, *, shares: bool) -> tuple[Kind, ...]:
        """Return what it moves off its GPUs; `shares`: whether other roles work there."""
        return ("params",) if (shares if self.offload is None else self.offload) else ()


@dataclass(frozen=True)
class Question:
    """A model, its roles on a cluster, and the work of a step, which together are to be planned."""

    shape: ModelShape
    gpu: Gpu
    allocation: Allocation
    n_nodes: int
    gpus_per_node: int
    """0 for CPU processes, which are planned as if each had a GPU."""
    work: Workload
    generation_batch: int
    """Most sequences that a replica of the embedded engine decodes together."""
    generated: int
    """Sequences that all replicas generate in a step."""
    reference: ModelShape | None = None
    """The frozen reference model, which is in the actor's processes unless `ref` has devices of its own."""
    reference_bytes: int | None = None
    """Bytes of a weight of the reference model; None: as many as of the actor's."""
    reference_tokens: int | None = None
    """Most tokens of a micro-batch of the reference model; None: as many as of the actor's."""
    reference_is_offloaded: bool = False
    """Whether its weights leave the GPUs while it does not work."""
    reference_moves: bool = False
    """Whether it follows the actor, so that checkpoints have its weights."""
    reference_is_average: bool = False
    """Whether it follows as an average, which is in host memory in float32."""
    rollout_bytes: int = 2
    """Bytes of a weight and of a cached key in the rollout."""
    memory_fraction: float | None = None
    """Share of a GPU's memory that a server takes; None for its usual share, less what other roles keep there."""
    devices: Mapping[str, tuple[int, ...]] | None = None
    """Each role's devices, numbered across nodes; None where the allocation's `+` and `|` decide."""
    critic: CriticQuestion | None = None
    """The critic, if there is one."""
    frozen: Mapping[str, FrozenQuestion] = field(default_factory=dict)
    """Models that are not trained, by role; the reference is not among them."""
    offload: OffloadChoice = KEEP_ALL
    """What the actor may move off GPUs that a rollout shares with it."""
    host_memory_gib: int | None = None
    """Host memory of a node in GiB; None if it is not known."""
    weight_transport: str = "auto"
    """How weights go from the actor to the rollout."""
    overlaps_weight_sync: bool | None = False
    """Whether the actor trains on while a rollout on devices of its own takes a copy of its weights; None: if they go
    through host memory anyway."""
    writes_checkpoints: bool = False
    """Whether the run writes checkpoints."""
    snapshot: Literal["auto", "copy", "blocking"] = "auto"
    """Whether trainers copy their state to host memory, from which checkpoints are written: `recover.snapshot`."""
    notes: tuple[str, ...] = ()
    """What the recipe left open, and how it was understood."""

    def place(self) -> Placement:
        """Return the roles on their devices.

        Raises:
            ValueError: roles that do not fit on the cluster or on their lists.
        """
        if self.devices is None:
            return place_allocation(self.allocation, self.n_nodes, self.gpus_per_node)
        roles = {role.role: (role, self.devices[role.role]) for role in self.allocation.roles}
        return place_by_list(roles, self.n_nodes, self.gpus_per_node)

    def of(self, role: str) -> Question:
        """Return the question about the model and the work of `role`, which are the actor's unless it has its own."""
        own = self.critic if role == "critic" else self.frozen.get(role)
        return self if own is None else replace(self, shape=own.shape, work=own.work, reference=None)

    @property
    def kept_reference(self) -> ModelShape | None:
        """The reference model if the actor's processes hold it, else None."""
        return None if any(role.role == "ref" for role in self.allocation.roles) else self.reference

    @property
    def text(self) -> str:
        """The roles and where they are, in one line."""
        if self.devices is None:
            return str(self.allocation)
        return ", ".join(f"{role} on {device_text(self.devices[role.role])}" for role in self.allocation.roles)
