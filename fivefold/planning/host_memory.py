"""Host memory of each node: processes, optimizer state that is kept there, and what trainers offload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from fivefold.planning.memory import Kind
from fivefold.planning.role_plans import RolloutPlan, TrainerPlan, gb

PROCESS_BYTES = 4_000_000_000
"""Host memory of one process of a role: Python, PyTorch, CUDA and NCCL."""
GIB = 2**30


def host_bytes(
    trainers: Iterable[TrainerPlan], rollouts: Iterable[RolloutPlan], offloaded: tuple[Kind, ...]
) -> dict[int, int]:
    """Return the bytes of host memory that the roles of each node need, where the actor offloads `offloaded`."""
    needed: Counter[int] = Counter()
    for trainer in trainers:
        placed = trainer.placed
        per_stage = placed.layout.world_size // placed.layout.pp
        moved = offloaded if placed.role == "actor" else ()
        for rank, device in enumerate(placed.devices):
            needed[device.node] += trainer.memory[rank // per_stage].on_host(moved) + PROCESS_BYTES
    for rollout in rollouts:
        for device in rollout.placed.devices:
            needed[device.node] += PROCESS_BYTES
    return dict(needed)


def host_problems(needed: dict[int, int], host_memory_gib: int | None) -> Iterator[str]:
    """Yield a line if the roles of a node need more host memory than it has."""
    node, most = max(needed.items(), key=lambda item: item[1], default=(0, 0))
    if host_memory_gib is not None and most > host_memory_gib * GIB:
        yield (
            f"node {node}: its roles need {gb(most)} GB of host memory, of the {gb(host_memory_gib * GIB)} GB of "
            "cluster.host_memory_gib; offload less (actor.offload), or store less of the optimizer's state "
            "(store_param_remainders, exp_avg_dtype and exp_avg_sq_dtype of actor.megatron.optimizer)"
        )
