"""Host memory of each node: processes, trainers' state that is kept there or moved there, copies for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fivefold.planning.memory import Kind
from fivefold.planning.role_plans import RolloutPlan, TrainerPlan, gb

PROCESS_BYTES = 4_000_000_000
"""Host memory of one process of a role: Python, PyTorch, CUDA and NCCL."""
GIB = 2**30


@dataclass(frozen=True)
class HostMemory:
    """Bytes of a node's host memory that the roles need."""

    processes: int = 0
    state: int = 0
    """Bytes of pinned memory for state that is kept on the host or is moved there."""
    snapshots: int = 0
    """Bytes of pinned memory for the copies from which checkpoints are written."""
    weights: int = 0
    """Bytes of the weights on their way to a rollout."""

    @property
    def total(self) -> int:
        """All bytes."""
        return self.processes + self.state + self.snapshots + self.weights

    def __add__(self, other: HostMemory) -> HostMemory:
        return HostMemory(
            self.processes + other.processes,
            self.state + other.state,
            self.snapshots + other.snapshots,
            self.weights + other.weights,
        )

    def describe(self) -> str:
        """Return the parts as text, in GB."""
        parts = {
            "processes": self.processes,
            "pinned weights and optimizer state": self.state,
            "copies for checkpoints": self.snapshots,
            "weights on their way to the rollout": self.weights,
        }
        return ", ".join(f"{gb(size)} GB of {name}" for name, size in parts.items() if size)


def host_memory(
    trainers: Iterable[TrainerPlan],
    rollouts: Iterable[RolloutPlan],
    offloaded: tuple[Kind, ...],
    *,
    copies_state: bool,
    copied_weights: Mapping[int, int],
) -> dict[int, HostMemory]:
    """Return the host memory that the roles need, by node.

    Args:
        trainers: plans of the roles that train or compute log-probs.
        rollouts: plans of the roles that generate.
        offloaded: what the actor moves off its GPUs.
        copies_state: whether trainers copy their state to host memory for checkpoints.
        copied_weights: bytes of the weights on their way to the rollout, by node.
    """
    needed: dict[int, HostMemory] = {}
    for trainer in trainers:
        placed = trainer.placed
        per_stage = placed.layout.world_size // placed.layout.pp
        moved = offloaded if placed.role == "actor" else trainer.offloaded
        for rank, device in enumerate(placed.devices):
            memory = trainer.memory[rank // per_stage]
            of_rank = HostMemory(PROCESS_BYTES, memory.on_host(moved), memory.snapshot if copies_state else 0)
            needed[device.node] = needed.get(device.node, HostMemory()) + of_rank
    for rollout in rollouts:
        for device in rollout.placed.devices:
            needed[device.node] = needed.get(device.node, HostMemory()) + HostMemory(PROCESS_BYTES)
    for node, n_bytes in copied_weights.items():
        needed[node] += HostMemory(weights=n_bytes)
    return needed


def fullest(needed: Mapping[int, HostMemory]) -> tuple[int, HostMemory]:
    """Return the node that needs the most host memory, and what it needs."""
    return max(needed.items(), key=lambda item: item[1].total, default=(0, HostMemory()))


def host_problems(needed: Mapping[int, HostMemory], host_memory_gib: int | None) -> Iterator[str]:
    """Yield a line if the roles of a node need more host memory than it has."""
    node, most = fullest(needed)
    if host_memory_gib is None or most.total <= host_memory_gib * GIB:
        return
    relief = [
        "offload less (actor.offload)",
        "store less of the optimizer's state (exp_avg_dtype and exp_avg_sq_dtype of actor.megatron.optimizer or "
        "actor.fsdp.optimizer; of the former also store_param_remainders)",
    ]
    if most.snapshots:
        relief.append("write checkpoints without a copy (recover.snapshot=blocking)")
    if most.weights:
        relief.append(
            "send weights from GPU to GPU while training waits (rollout.weight_transport=ipc or nccl, and "
            "rollout.overlap_weight_sync=false)"
        )
    yield (
        f"node {node}: its roles need {gb(most.total)} GB of host memory, of the {gb(host_memory_gib * GIB)} GB of "
        f"cluster.host_memory_gib: {most.describe()}; {', or '.join(relief)}"
    )
