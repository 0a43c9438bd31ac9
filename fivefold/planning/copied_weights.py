"""Memory of the copy from which a rollout takes weights while the actor trains on."""

from __future__ import annotations

from fivefold.config.weight_buckets import DEVICE_BYTES
from fivefold.layout.placement import Placement
from fivefold.layout.transport import Transport, pick_transport
from fivefold.planning.question import Question


def copied_weights(question: Question, placement: Placement) -> dict[int, int]:
    """Return the bytes of the copy in host memory, by node; nothing if there is none.

    It is on the node of the actor's first rank. Through host memory it goes to the nodes of the replicas.
    """
    transport = transport_beside_training(question, placement)
    if transport is None:
        return {}
    nodes = {placement["actor"].devices[0].node}
    if transport == "folder":
        nodes |= {device.node for device in placement["rollout"].devices}
    return dict.fromkeys(sorted(nodes), question.shape.n_parameters * question.rollout_bytes)


def bucket_beside_training(question: Question, placement: Placement) -> int:
    """Return the bytes of the bucket that is on the sending rank's device while it trains; 0: there is none."""
    if transport_beside_training(question, placement) != "nccl":
        return 0
    return max(DEVICE_BYTES, question.rollout_bytes * question.shape.hidden * question.shape.vocab)


def transport_beside_training(question: Question, placement: Placement) -> Transport | None:
    """Return how weights travel while the actor trains on; None: it waits."""
    if question.overlaps_weight_sync is False or "rollout" not in placement or placement.sharers("rollout"):
        return None
    transport = pick_transport(question.weight_transport, placement)
    return transport if transport == "folder" or question.overlaps_weight_sync else None
