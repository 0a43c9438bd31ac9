"""The inputs of a plan: roles with their models and work, on a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from fivefold.config.schema.role import OFFLOADABLE, Offloadable
from fivefold.families.shape import ModelShape
from fivefold.layout.allocation import Allocation
from fivefold.layout.devices import device_text
from fivefold.layout.gpus import Gpu
from fivefold.layout.placement import Placement, place_allocation, place_by_list
from fivefold.planning.workload import Workload

Leaves = Mapping[Offloadable, bool | None]
"""Whether each part of a model's state leaves the GPUs while its role waits; None: the plan decides, missing: never."""
OPEN: Leaves = dict.fromkeys(OFFLOADABLE)
"""The plan decides on every part."""


def may_leave(leaves: Leaves) -> tuple[Offloadable, ...]:
    """Return the parts that may be offloaded."""
    return tuple(part for part in OFFLOADABLE if leaves.get(part, False) is not False)


def must_leave(leaves: Leaves) -> tuple[Offloadable, ...]:
    """Return the parts that are offloaded whatever the plan finds."""
    return tuple(part for part in OFFLOADABLE if leaves.get(part))


def leaves_if(leaves: Leaves, *, shares: bool) -> tuple[Offloadable, ...]:
    """Return the parts that are offloaded if open ones leave when the role `shares` its GPUs."""
    return tuple(part for part in may_leave(leaves) if leaves[part] or shares)


def offload_steps(leaves: Leaves) -> Iterator[tuple[Offloadable, ...]]:
    """Yield what could be offloaded, from the least to the most.

    Offloading gradients costs nothing, because they are only freed, so they always leave if the plan may decide.
    """
    chosen = set(must_leave(leaves)) | {part for part in may_leave(leaves) if part == "grads"}
    yield tuple(part for part in OFFLOADABLE if part in chosen)
    for part in ("optimizer", "params"):
        if part in may_leave(leaves) and part not in chosen:
            chosen.add(part)
            yield tuple(each for each in OFFLOADABLE if each in chosen)


@dataclass(frozen=True)
class ModelInputs:
    """The model of a role that trains or scores."""

    shape: ModelShape
    """The model with its head."""
    work: Workload
    """The work of one optimizer step; for a frozen model, its longest sequences and its micro-batches."""
    trains: bool = True
    leaves: Leaves = field(default_factory=dict)
    """What leaves its GPUs while it does not work. Open parts of the actor leave if a rollout on the same GPUs needs
    the room, and open parts of other roles if any role shares their GPUs."""
    follows: float | None = None
    """Share of its weights that a frozen model keeps when it follows the actor; None: it does not follow."""


@dataclass(frozen=True)
class GeneratorInputs:
    """What a role generates."""

    batch: int
    """Most sequences that a replica of the embedded engine decodes together."""
    generated: int
    """Sequences that all replicas generate in a step."""
    element_bytes: int = 2
    """Bytes of a weight, and of a cached key or value."""
    is_quantized: bool = False
    """Whether a server keeps the matrices of layers in one byte an element."""
    drafts_by_layers: bool = False
    """Whether a server holds a layer for multi-token prediction, too."""
    memory_fraction: float | None = None
    """Share of a GPU's memory that a server takes; None: its usual share, less what other roles keep there."""


@dataclass(frozen=True)
class RolloutInputs(GeneratorInputs):
    """What the rollout generates with the actor's weights, and how it gets them."""

    transport: str = "auto"
    """How weights go from the actor to the rollout."""
    overlaps_sync: bool | None = False
    """Whether the actor trains on while a rollout on separate devices receives a copy of its weights; None: if they go
    through host memory anyway."""


@dataclass(frozen=True, kw_only=True)
class JudgeInputs(GeneratorInputs):
    """What a frozen model generates that judges."""

    shape: ModelShape
    sequence_length: int
    """Tokens of the longest question and answer together."""


@dataclass(frozen=True)
class Inputs:
    """Everything that a plan is computed from."""

    gpu: Gpu
    allocation: Allocation
    n_nodes: int
    gpus_per_node: int
    """0 for CPU processes, which are planned as if each had a GPU."""
    models: Mapping[str, ModelInputs]
    """Models by role. A reference that is not in the allocation lives in the actor's processes."""
    rollout: RolloutInputs
    judge: JudgeInputs | None = None
    """The frozen model that judges; None: there is none."""
    devices: Mapping[str, tuple[int, ...]] | None = None
    """Each role's devices, numbered across nodes; None: the allocation's `+` and `|` decide."""
    host_memory_gib: int | None = None
    """Host memory of a node in GiB; None: unknown."""
    writes_checkpoints: bool = False
    snapshot: Literal["auto", "copy", "blocking"] = "auto"
    """Whether checkpoints are written from a copy of the state in host memory: `recover.snapshot`."""
    notes: tuple[str, ...] = ()
    """What the recipe left open, and how it was understood."""

    @property
    def actor(self) -> ModelInputs:
        """The model that the run trains."""
        return self.models["actor"]

    def generator(self, role: str) -> GeneratorInputs:
        """Return what a role generates."""
        return self.judge if role == "judge" and self.judge is not None else self.rollout

    def generated_with(self, role: str) -> tuple[ModelShape, int]:
        """Return the model with which a role generates, and the tokens of its longest sequence."""
        generator = self.generator(role)
        if isinstance(generator, JudgeInputs):
            return generator.shape, generator.sequence_length
        return self.actor.shape, self.actor.work.sequence_length

    @property
    def on_gpus(self) -> bool:
        """Whether roles run on GPUs."""
        return self.gpus_per_node > 0

    @property
    def hosted_reference(self) -> ModelInputs | None:
        """The reference model if the actor's processes hold it."""
        is_placed = any(role.role == "ref" for role in self.allocation.roles)
        return None if is_placed else self.models.get("ref")

    @property
    def text(self) -> str:
        """The roles and their devices in one line."""
        if self.devices is None:
            return str(self.allocation)
        return ", ".join(f"{role} on {device_text(self.devices[role.role])}" for role in self.allocation.roles)

    def place(self) -> Placement:
        """Return the roles on their devices.

        Raises:
            ValueError: roles that do not fit on the cluster or on their lists.
        """
        if self.devices is None:
            return place_allocation(self.allocation, self.n_nodes, self.gpus_per_node)
        roles = {role.role: (role, self.devices[role.role]) for role in self.allocation.roles}
        return place_by_list(roles, self.n_nodes, self.gpus_per_node)
