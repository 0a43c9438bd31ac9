"""Weights by NCCL: rank 0 of the trainer broadcasts its buffer to all processes of the engines, on other GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fivefold.layout.placement import Placement
from fivefold.weights.transport import DEVICE_BYTES, Route, Transport, stages_obstacle

if TYPE_CHECKING:
    from fivefold.weights.stream import Receiver, Sender


@dataclass(frozen=True)
class NCCL(Transport):
    """The trainer and all engines are in one NCCL group; an item announces a broadcast."""

    name: ClassVar[str] = "nccl"
    title: ClassVar[str] = "from GPU to GPU, by NCCL"
    measured_with: ClassVar[frozenset[str] | None] = frozenset({"vllm", "sglang"})
    is_collective: ClassVar[bool] = True

    def obstacle(self, placement: Placement) -> str | None:
        """Return why rank 0 of the actor cannot broadcast to the engines; None: it can."""
        if placement.is_cpu:
            return "without GPUs there is no NCCL"
        rollout = placement["rollout"]
        if not rollout.layout.is_server:
            return f"{rollout.layout.backend} has no end for it: it is for servers"
        if placement["actor"].devices[0] in rollout.devices:
            return "the actor's first GPU is one of the rollout's, and NCCL takes one process on each GPU"
        return stages_obstacle(placement)

    def device_bytes(self, largest: int) -> int:
        """Return the bytes of the buffer: it is sent before it is filled again."""
        return max(DEVICE_BYTES, largest)

    def sender(self, route: Route, rank: int, timeout_s: float) -> Sender:
        """Return what broadcasts."""
        from fivefold.weights.nccl_sender import NCCLSender

        return NCCLSender(route, rank, timeout_s)

    def receiver(self) -> Receiver:
        """Raise an error: only servers are in the group, which load the broadcasts themselves."""
        raise ValueError("weights by NCCL go to servers alone: set rollout.weight_transport=auto")
