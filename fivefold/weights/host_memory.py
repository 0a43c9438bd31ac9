"""Weights through host memory: Ray's object store, and for servers a folder of files on the replica's node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fivefold.layout.placement import Placement
from fivefold.weights.transport import Route, Transport

if TYPE_CHECKING:
    from fivefold.weights.stream import Receiver, Sender

HOST_BYTES = 128 * 2**20
"""Bytes of a bucket; it is filled on the trainer's device."""


@dataclass(frozen=True)
class HostMemory(Transport):
    """Rank 0 packs the weights into buckets, which every replica reads from the object store."""

    name: ClassVar[str] = "folder"
    title: ClassVar[str] = "through host memory"
    carries_weights: ClassVar[bool] = True

    def obstacle(self, placement: Placement) -> str | None:
        """Return why a server cannot read the files; None: it can."""
        rollout = placement["rollout"]
        if rollout.nodes_per_replica == 1:
            return None
        return (
            f"a replica is on {rollout.nodes_per_replica} nodes, and the files are in the memory of its first one: "
            "give every GPU of the rollout a rank of the actor (ipc), or the actor its own GPUs (nccl)"
        )

    def device_bytes(self, largest: int) -> int:
        """Return the bytes of the bucket that is filled on the device; larger tensors are spread over several."""
        return HOST_BYTES

    def sender(self, route: Route, rank: int, timeout_s: float) -> Sender:
        """Return what packs buckets."""
        from fivefold.weights.buckets import HostSender

        return HostSender(route, rank, HOST_BYTES)

    def receiver(self) -> Receiver:
        """Return what unpacks buckets."""
        from fivefold.weights.buckets import unpack

        return unpack


THROUGH_HOST = Route(HostMemory(), "float32", checksum=False)
"""The route of an actor without a rollout."""
