"""Weights by CUDA IPC: an engine opens the buffers that a rank of the trainer fills on the same GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fivefold.layout.placement import Placement
from fivefold.weights.transport import DEVICE_BYTES, Route, Transport, stages_obstacle

if TYPE_CHECKING:
    from fivefold.weights.stream import Receiver, Sender

N_BUFFERS = 2
"""An engine reads one buffer while the other is filled."""


@dataclass(frozen=True)
class IPC(Transport):
    """Every rank that shares its GPU with an engine fills the same buffers and hands out handles."""

    name: ClassVar[str] = "ipc"
    title: ClassVar[str] = "on the GPU, by CUDA IPC"
    measured_with: ClassVar[frozenset[str] | None] = frozenset({"vllm", "sglang"})
    passes_handles: ClassVar[bool] = True

    def obstacle(self, placement: Placement) -> str | None:
        """Return why engines cannot open the trainer's buffers; None: they can."""
        if placement.is_cpu:
            return "without GPUs there is no CUDA IPC"
        rollout = placement["rollout"]
        if foreign := set(rollout.devices) - set(placement["actor"].devices):
            return f"{len(foreign)} of the rollout's {len(rollout.devices)} GPUs hold no rank of the actor"
        return stages_obstacle(placement)

    def device_bytes(self, largest: int) -> int:
        """Return the bytes of the buffers; each holds the largest tensor."""
        return N_BUFFERS * max(DEVICE_BYTES, largest)

    def sender(self, route: Route, rank: int, timeout_s: float) -> Sender:
        """Return what fills the buffers."""
        from fivefold.weights.ipc_buffers import IPCSender

        return IPCSender(route, rank, N_BUFFERS)

    def receiver(self) -> Receiver:
        """Return what opens the buffers."""
        from fivefold.weights.ipc_buffers import opened_tensors

        return opened_tensors

    def merged(self, parts: Sequence[Any]) -> Any:
        """Return the bucket with the handles of all ranks."""
        from fivefold.weights.device_buckets import merged

        return merged(parts)

    def readers(self, placement: Placement) -> frozenset[int]:
        """Return the ranks whose devices an engine is on."""
        devices = placement["rollout"].devices
        return frozenset(rank for rank, device in enumerate(placement["actor"].devices) if device in devices)
