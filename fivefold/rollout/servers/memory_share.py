"""The share of a GPU's memory that a server takes."""

from __future__ import annotations

from dataclasses import replace

from fivefold.layout.backends import BACKENDS
from fivefold.observe.machine import least_gpu_memory
from fivefold.rollout.replica import ReplicaSpec


def with_share(spec: ReplicaSpec) -> ReplicaSpec:
    """Return `spec` with the share of the memory that other roles on the devices leave to the server.

    Raises:
        ValueError: they leave nothing, or this process sees no GPU.
    """
    if spec.memory_fraction is not None or not spec.can_sleep:
        return spec
    memory = least_gpu_memory()
    if memory is None:
        raise ValueError(f"{spec.backend} shares GPUs with other roles, but this process sees no GPU")
    left = BACKENDS[spec.backend].memory_share - spec.reserved / memory
    if left <= 0:
        raise ValueError(
            f"the roles that share a GPU with {spec.backend} keep {spec.reserved / 1e9:.1f} GB of it, which leaves "
            f"nothing for the server: give them separate devices ({spec.section}.colocate=false), or split them further"
        )
    return replace(spec, memory_fraction=round(left, 3))


def share_bytes(spec: ReplicaSpec) -> int | None:
    """Return the bytes of the smallest GPU that a server takes; None: it settles that itself, or there is no GPU."""
    memory, share = least_gpu_memory(), spec.memory_fraction
    return None if memory is None or share is None else int(share * memory)
