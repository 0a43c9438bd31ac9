"""Host memory of each node: processes, state that is kept there or moved there, copies for checkpoints, weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fivefold.config.schema.role import Offloadable
from fivefold.layout.placement import RolePlacement
from fivefold.planning.memory import RankMemory

PROCESS_BYTES = 4_000_000_000
"""Host memory of one process of a role: Python, PyTorch, CUDA and NCCL."""
GIB = 2**30
USABLE = 0.95
"""Share of a node's memory above which Ray ends processes."""


@dataclass(frozen=True)
class HostMemory:
    """Bytes of a node's host memory that the roles need."""

    processes: int = 0
    state: int = 0
    """Pinned memory of state that is kept on the host or moved there."""
    snapshots: int = 0
    """Pinned memory of the copies from which checkpoints are written."""
    weights: int = 0
    """Weights on their way to a rollout."""

    @property
    def total(self) -> int:
        """All bytes."""
        return self.processes + self.state + self.snapshots + self.weights

    def __add__(self, other: HostMemory) -> HostMemory:
        return HostMemory(**{name: value + getattr(other, name) for name, value in vars(self).items()})


def host_memory(
    models: Iterable[tuple[RolePlacement, tuple[RankMemory, ...], Collection[Offloadable]]],
    generating: Iterable[tuple[RolePlacement, int]],
    *,
    copies_state: bool,
    copied_weights: Mapping[int, int],
) -> dict[int, HostMemory]:
    """Return the host memory that the roles need, by node.

    Args:
        models: roles that train or score, each with the memory of its stages and what it moves to the host.
        generating: roles that generate, each with the bytes of weights that a rank keeps on the host.
        copies_state: whether trainers copy their state to host memory for checkpoints.
        copied_weights: bytes of the weights on their way to the rollout, by node.
    """
    needed: dict[int, HostMemory] = {}
    for placed, stages, moved in models:
        per_stage = placed.layout.world_size // placed.layout.pp
        for rank, device in enumerate(placed.devices):
            memory = stages[rank // per_stage]
            of_rank = HostMemory(PROCESS_BYTES, memory.on_host(moved), memory.snapshot if copies_state else 0)
            needed[device.node] = needed.get(device.node, HostMemory()) + of_rank
    for placed, kept in generating:
        for device in placed.devices:
            needed[device.node] = needed.get(device.node, HostMemory()) + HostMemory(PROCESS_BYTES, kept)
    for node, n_bytes in copied_weights.items():
        needed[node] += HostMemory(weights=n_bytes)
    return needed


def fullest(needed: Mapping[int, HostMemory]) -> tuple[int, HostMemory]:
    """Return the node that needs the most host memory, and what it needs."""
    return max(needed.items(), key=lambda item: item[1].total, default=(0, HostMemory()))


def exceeds_host(needed: Mapping[int, HostMemory], host_memory_gib: int | None) -> bool:
    """Return whether the roles of a node need more host memory than Ray lets them take of what it is known to have."""
    return host_memory_gib is not None and fullest(needed)[1].total > USABLE * host_memory_gib * GIB
