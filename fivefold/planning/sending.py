"""Memory of the moment at which weights go from the actor to a rollout: buckets, and two copies of the weights."""

from __future__ import annotations

from collections.abc import Collection

from fivefold.families.shape import ModelShape
from fivefold.layout.parallel import ParallelLayout
from fivefold.planning.memory import Kind, RankMemory
from fivefold.weights.transport import GATHER_BYTES, Transport


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
    return transport.device_bytes(largest) + (max(GATHER_BYTES, largest) if is_cut else 0)


def kept_while_sending(stage: RankMemory, offloaded: Collection[Kind]) -> int:
    """Return the bytes that a rank of the actor has on its GPU while its weights go to the rollout.

    Args:
        stage: its memory, with the buckets.
        offloaded: what it moves off the GPU for the rollout.
    """
    return stage.kept([kind for kind in offloaded if kind != "params"]) + stage.sending
