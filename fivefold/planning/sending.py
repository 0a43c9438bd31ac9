"""Memory of weights on their way from the actor to a rollout, on GPUs and in host memory.

Through host memory, servers read files there, whether the trainer waits or not. Training that overlaps the transfer
needs a copy to send from.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fivefold.config.schema.role import Offloadable
from fivefold.families.served import ServedAdapters, file_elements, room_elements
from fivefold.families.shape import ModelShape
from fivefold.layout.backends import BACKENDS
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.placement import Placement
from fivefold.planning.inputs import Inputs
from fivefold.planning.memory import RankMemory
from fivefold.weights.table import TRANSPORTS, overlaps, pick
from fivefold.weights.transport import GATHER_BYTES, Transport

_MERGING = 7
"""Copies of a part of the weights, in their dtype, while adapters are merged into it: in float32, the weights, what is
added in two arrangements, and the sum."""


def sending_bytes(layout: ParallelLayout, shape: ModelShape, transport: Transport, *, element_bytes: int) -> int:
    """Return the most bytes that a rank of the actor takes for buckets while it sends its weights.

    Args:
        layout: layout of the actor.
        shape: its model.
        transport: how weights travel.
        element_bytes: bytes of an element of the actor's weights.
    """
    largest = element_bytes * shape.hidden * max(shape.vocab, shape.ffn_hidden if not all(shape.moe_layers) else 0)
    is_cut = layout.tp * layout.pp * layout.ep * layout.etp > 1
    merging = 0 if shape.adapters is None or transport.sends_adapters else _MERGING * GATHER_BYTES
    return transport.device_bytes(largest) + (max(GATHER_BYTES, largest) if is_cut else 0) + merging


def kept_while_sending(stage: RankMemory, offloaded: Collection[Offloadable], *, streams_frozen: bool) -> int:
    """Return the bytes that a rank of the actor has on its GPU while its weights go to the rollout.

    Args:
        stage: its memory, with the buckets.
        offloaded: what it moves off the GPU for the rollout.
        streams_frozen: whether weights that are not trained stay in host memory, and pass through the GPU.
    """
    kept = stage.kept([part for part in offloaded if part != "params"]) + stage.sending
    return kept - stage.frozen if streams_frozen else kept


def may_stream_frozen(stages: Iterable[RankMemory], leaves: Collection[Offloadable]) -> bool:
    """Return whether weights may go to a rollout from host memory.

    Args:
        stages: memory of a rank of each stage of the actor.
        leaves: what may be offloaded.
    """
    return "params" in leaves and any(stage.frozen for stage in stages)


def overlapping_transport(inputs: Inputs, placement: Placement) -> Transport | None:
    """Return the transport that works in parallel with training; None: the actor waits for its transport."""
    asked = inputs.rollout.overlaps_sync
    if asked is False or "rollout" not in placement or placement.sharers("rollout"):
        return None
    transport = pick(inputs.rollout.transport, placement)
    return transport if overlaps(transport, asked=asked) else None


def overlapping_bytes(inputs: Inputs, placement: Placement) -> int:
    """Return the bytes of the buffers on the sending rank's device while it trains."""
    transport = overlapping_transport(inputs, placement)
    if transport is None or transport.carries_weights:
        return 0
    shape = inputs.actor.shape
    return transport.device_bytes(inputs.rollout.element_bytes * shape.hidden * shape.vocab)


def copied_weights(inputs: Inputs, placement: Placement) -> dict[int, int]:
    """Return the bytes of weights in host memory on their way to the rollout, by node; empty if there are none.

    The copy is on the node of the actor's first rank. It becomes files when servers on its node receive it.
    """
    if "rollout" not in placement:
        return {}
    rollout, overlapping = placement["rollout"], overlapping_transport(inputs, placement)
    nodes = set() if overlapping is None else {placement["actor"].devices[0].node}
    transport = pick(inputs.rollout.transport, placement) if rollout.layout.is_server else overlapping
    if transport is not None and transport.carries_weights:
        nodes |= {device.node for device in rollout.devices}
    shape = inputs.actor.shape
    elements = file_elements(shape) if serves_adapters(inputs) else shape.n_live_parameters
    return dict.fromkeys(sorted(nodes), elements * inputs.rollout.element_bytes)


def serves_adapters(inputs: Inputs) -> bool:
    """Return whether the rollout's servers have adapters next to weights that nobody sends them."""
    asked = TRANSPORTS.get(inputs.rollout.transport)
    return asked is not None and asked.serves_adapters


def served_bytes(inputs: Inputs, layout: ParallelLayout) -> int:
    """Return the bytes of the room that each rank of a rollout makes for adapters next to its weights."""
    shape, backend = inputs.actor.shape, BACKENDS[layout.backend]
    if not serves_adapters(inputs) or shape.adapters is None:
        return 0
    rank = backend.adapter_room(ServedAdapters.of(shape).rank)
    return room_elements(shape, rank, layout.tp) * inputs.rollout.element_bytes // layout.pp
