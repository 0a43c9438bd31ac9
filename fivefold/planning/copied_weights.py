"""Host memory of weights on their way to a rollout.

Through host memory, servers read files there, whether the trainer waits or not. Training that overlaps the transfer
needs a copy to send from.
"""

from __future__ import annotations

from fivefold.layout.placement import Placement
from fivefold.planning.question import Question
from fivefold.weights.table import overlaps, pick
from fivefold.weights.transport import Transport


def copied_weights(question: Question, placement: Placement) -> dict[int, int]:
    """Return the bytes of the weights in host memory on their way to the rollout, by node; nothing if there are none.

    The copy is on the node of the actor's first rank, and becomes files as servers' replicas on its node take it.
    """
    if "rollout" not in placement:
        return {}
    rollout, overlapping = placement["rollout"], overlapping_transport(question, placement)
    nodes = set() if overlapping is None else {placement["actor"].devices[0].node}
    transport = pick(question.weight_transport, placement) if rollout.layout.is_server else overlapping
    if transport is not None and transport.carries_weights:
        nodes |= {device.node for device in rollout.devices}
    return dict.fromkeys(sorted(nodes), question.shape.n_parameters * question.rollout_bytes)


def overlapping_bytes(question: Question, placement: Placement) -> int:
    """Return the bytes of the buffers on the sending rank's device while it trains."""
    transport = overlapping_transport(question, placement)
    if transport is None or transport.carries_weights:
        return 0
    return transport.device_bytes(question.rollout_bytes * question.shape.hidden * question.shape.vocab)


def overlapping_transport(question: Question, placement: Placement) -> Transport | None:
    """Return the transport that works in parallel with training; None: the actor waits for its transport."""
    if question.overlaps_weight_sync is False or "rollout" not in placement or placement.sharers("rollout"):
        return None
    transport = pick(question.weight_transport, placement)
    return transport if overlaps(transport, asked=question.overlaps_weight_sync) else None
