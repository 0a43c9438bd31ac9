"""What an engine gets of a transport: all weights of the model, be it that adapters alone have come.

A server that keeps adapters next to its weights gets them as they have come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fivefold.weights.stream import Receiver
from fivefold.weights.transport import Transport


def receiver_of(transport: Transport, path: str) -> Receiver:
    """Return the end of a transport for an engine of the model in `path`, which yields all of its weights."""
    receiver = transport.receiver()
    if not transport.sends_adapters or transport.serves_adapters:
        return receiver
    # Imported by who chooses it.
    from fivefold.rollout.merging import merged

    def receive(items: Iterator[Any], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        adapters: Iterable[tuple[str, Tensor]] = receiver(items, device)
        return merged(transport, path, adapters, device)

    return receive
