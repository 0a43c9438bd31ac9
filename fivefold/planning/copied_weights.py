"""Host memory of weights on their way to a rollout.

Through host memory, servers read files there, whether the trainer waits for that or not. A trainer that trains on sends
out of a copy.
"""

from __future__ import annotations

from fivefold.config.weight_buckets import DEVICE_BYTES
from fivefold.layout.placement import Placement
from fivefold.layout.transport import Transport, pick_transport
from fivefold.planning.question import Question


def copied_weights(question: Question, placement: Placement) -> dict[int, int]:
    """Return the bytes of the weights in host memory on their way to the rollout, by node; nothing if there are none.

    The copy is on the node of the actor's first rank, and becomes files as servers' replicas on its node take it.
    """
    if "rollout" not in placement:
        return {}
    rollout, beside = placement["rollout"], transport_beside_training(question, placement)
    nodes = set() if beside is None else {placement["actor"].devices[0].node}
    if beside == "folder" or (
        rollout.layout.is_server and pick_transport(question.weight_transport, placement) == "folder"
    ):
        nodes |= {device.node for device in rollout.devices}
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
