"""The part of a trainer's worker that sends weights to a rollout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from fivefold.cluster.role import Part
from fivefold.roles.trainer_worker import TrainerWorker
from fivefold.weights.stream import CollectiveSender, Sender
from fivefold.weights.transport import Route


class SendsWeights(Part):
    """Sends the weights of an engine. All ranks take part in every method, unless it says otherwise."""

    def __init__(self, worker: TrainerWorker) -> None:
        """Begin without a sender; one that connects to the rollout waits `TrainerSpec.timeout_s` for it."""
        self._engine = worker.engine
        self._timeout_s = worker.spec.timeout_s
        self._senders: dict[str, Sender] = {}
        """By the name of their transport."""
        self._items: Iterator[Any] | None = None

    def stream_weights(self, route: Route) -> Iterator[Any]:
        """Yield all weights as items, on rank 0; the other ranks take part and yield nothing."""
        yield from self._sender(route).items(self._engine.export_stacks(route.readers))

    def next_item(self, route: Route) -> Any | None:
        """Return this rank's part of the next item of all weights; None: there are no more."""
        if self._items is None:
            self._items = self.stream_weights(route)
        return next(self._items, None)

    def free_items(self, route: Route) -> None:
        """Free the buffers of the items, which every engine has loaded."""
        self._items = None
        self._sender(route).free()

    def copy_weights(self, route: Route) -> None:
        """Copy all weights to host memory, on the rank that has a link."""
        self._linked(route).copy(self._engine.export_stacks(route.readers))

    def next_copied(self, route: Route) -> Any | None:
        """Announce the next bucket of the copied weights, in parallel with other methods. None: there are no more."""
        return self._linked(route).next_copied()

    def open_link(self, route: Route, meeting: Any) -> Any:
        """Open a group with the rollout's processes, on rank 0. Returns what they need to enter it."""
        return self._linked(route).open_link(meeting)

    def enter_link(self, route: Route) -> None:
        """Enter the group, on rank 0, together with the rollout."""
        self._linked(route).enter_link()

    def _sender(self, route: Route) -> Sender:
        name = route.transport.name
        if name not in self._senders:
            self._senders[name] = route.transport.sender(route, dist.get_rank(), self._timeout_s)
        return self._senders[name]

    def _linked(self, route: Route) -> CollectiveSender:
        sender = self._sender(route)
        assert isinstance(sender, CollectiveSender), f"{route.transport.name} needs no link"
        return sender
