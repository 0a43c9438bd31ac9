"""The way of a run's weights from the trainer's processes to the rollout's replicas: the driver, and both ends.

`send`              trainer ──items──> replicas                  the trainer waits
`copy`, `give`      trainer ──copy──> host memory ──items──> replicas
                                 └─ the trainer may change its weights from here on

An item is a bucket of weights, or announces one that lies on the trainer's devices (`weights.transport`).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fivefold.cluster.group import Remote, WorkerGroup, put
from fivefold.cluster.role import Part
from fivefold.observe.timers import PhaseTimers
from fivefold.rollout.receiving import receiver_of
from fivefold.weights.nccl_link import Invitation, Meeting
from fivefold.weights.stream import CollectiveSender, Sender, Stack
from fivefold.weights.transport import Route

if TYPE_CHECKING:
    from fivefold.roles.rollout_worker import RolloutWorker
    from fivefold.roles.trainer_worker import TrainerWorker
    from fivefold.rollout.servers.engine import ServerEngine


class WeightSync:
    """Gives the replicas of a rollout the weights of a trainer."""

    def __init__(self, route: Route, trainer: WorkerGroup, replicas: WorkerGroup) -> None:
        """Take the processes of both ends."""
        self._route = route
        self._trainer = trainer
        self._replicas = replicas

    def meet(self) -> None:
        """Let trainer and replicas enter an NCCL group, if weights come over one and a server is in none.

        That is so at the start, and when a server was started again, because it had died or shows here that it hangs;
        the others then leave theirs. Servers with requests pause from here until they have the weights.
        """
        if not self._route.transport.is_collective or all(self._replicas.call(ReceivesWeights.expect_transfer)):
            return
        [meeting, *_] = self._replicas.call(ReceivesWeights.meeting)
        [invitation, *_] = self._trainer.call(SendsWeights.open_link, self._route, meeting)
        entering = self._replicas.start(ReceivesWeights.enter_link, invitation)
        # The group waits for both ends.
        self._trainer.start(SendsWeights.enter_link, self._route).wait()
        entering.wait()

    def send(self, version: int) -> None:
        """Give every replica the trainer's weights, as version `version`; they are gathered while replicas load."""
        self.meet()
        if self._route.transport.carries_weights:
            self._replicas.feed(ReceivesWeights.take, self._streamed(), version)
            return
        items = self._announced(lambda: self._trainer.call(SendsWeights.next_item, self._route))
        self._replicas.feed(ReceivesWeights.take, items, version)
        self._trainer.call(SendsWeights.free_items, self._route)

    def copy(self) -> Iterator[Remote]:
        """Copy the trainer's weights to host memory, and return the copy's items for `give`."""
        if self._route.transport.carries_weights:
            # A replica that takes an item frees its memory: nothing else refers to it.
            copied = deque(self._streamed())
            items: Iterator[Remote] = (copied.popleft() for _ in range(len(copied)))
        else:
            self._trainer.call(SendsWeights.copy, self._route)
            items = self._announced(lambda: self._trainer.control(SendsWeights.next_copied, self._route))
        # Last, because servers then pause until the weights come.
        self.meet()
        return items

    def give(self, items: Iterator[Remote], version: int, timers: PhaseTimers) -> None:
        """Give every replica a copy of the weights, as version `version`, in any thread.

        Replicas generate until all weights are on their side. By NCCL, new weights overwrite the old ones as they come,
        so the replicas pause.

        Raises:
            WorkerError: a replica refused the weights, or a worker died; all workers have been ended.
        """
        if not self._route.transport.carries_weights:
            with timers.phase("weight swap"):
                self._replicas.feed(ReceivesWeights.take, items, version)
            return
        with timers.phase("weight staging"):
            self._replicas.feed_beside(ReceivesWeights.stage, items, version)
        with timers.phase("weight swap"):
            self._replicas.call(ReceivesWeights.swap)

    def _streamed(self) -> Iterator[Remote]:
        """Yield the items of a transport that carries weights; the trainer runs ahead of the reader."""
        return self._trainer.stream(SendsWeights.stream, self._route)

    def _announced(self, ask: Callable[[], Sequence[Any]]) -> Iterator[Remote]:
        """Yield items of all ranks. Each is made while the replicas load the one before it.

        The reader asks for an item once the replicas have begun to load the last one, and so no longer read the buffer
        that is filled next.
        """
        while (item := self._route.transport.merged(ask())) is not None:
            yield put(item)


class SendsWeights(Part):
    """The trainer's end. All ranks take part in every method, unless it says otherwise."""

    def __init__(self, worker: TrainerWorker) -> None:
        """Begin without a sender; one that connects to the rollout waits `EngineOptions.timeout_s` for it."""
        self._engine = worker.engine
        self._timeout_s = worker.spec.options.timeout_s
        self._senders: dict[str, Sender] = {}
        """By the name of their transport."""
        self._items: Iterator[Any] | None = None

    def stream(self, route: Route) -> Iterator[Any]:
        """Yield all weights as items, on rank 0; the other ranks take part and yield nothing."""
        yield from self._sender(route).items(self._exported(route))

    def next_item(self, route: Route) -> Any | None:
        """Return this rank's part of the next item of all weights; None: there are no more."""
        if self._items is None:
            self._items = self.stream(route)
        return next(self._items, None)

    def free_items(self, route: Route) -> None:
        """Free the buffers of the items, which every engine has loaded."""
        self._items = None
        self._sender(route).free()

    def copy(self, route: Route) -> None:
        """Copy all weights to host memory, on the rank that has a link."""
        self._linked(route).copy(self._exported(route))

    def next_copied(self, route: Route) -> Any | None:
        """Announce the next bucket of the copied weights, in parallel with other methods. None: there are no more."""
        return self._linked(route).next_copied()

    def open_link(self, route: Route, meeting: Any) -> Any:
        """Open a group with the rollout's processes, on rank 0. Returns what they need to enter it."""
        return self._linked(route).open_link(meeting)

    def enter_link(self, route: Route) -> None:
        """Enter the group, on rank 0, together with the rollout."""
        self._linked(route).enter_link()

    def _exported(self, route: Route) -> Iterator[Stack]:
        if route.transport.sends_adapters:
            return self._engine.export_adapters(route.readers)
        return self._engine.export_stacks(route.readers)

    def _sender(self, route: Route) -> Sender:
        name = route.transport.name
        if name not in self._senders:
            self._senders[name] = route.transport.sender(route, dist.get_rank(), self._timeout_s)
        return self._senders[name]

    def _linked(self, route: Route) -> CollectiveSender:
        sender = self._sender(route)
        assert isinstance(sender, CollectiveSender), f"{route.transport.name} needs no link"
        return sender


class ReceivesWeights(Part):
    """A replica's end."""

    def __init__(self, worker: RolloutWorker) -> None:
        """Take the replica."""
        self._worker = worker
        self._spec = worker.spec

    def take(self, items: Iterator[Any], version: int) -> None:
        """Replace all weights by a transport's items, whose version is `version`."""
        self._worker.interrupted().receive(items, version)

    def stage(self, items: Iterator[Any], version: int) -> None:
        """Take the weights of the next `swap`, in host memory, while the replica generates."""
        receiver = receiver_of(self._spec.route.transport, self._spec.path)
        self._worker.engine.stage_weights(receiver(items, torch.device("cpu")), version)

    def swap(self) -> None:
        """Replace all weights by the weights of the last `stage`."""
        self._worker.interrupted().swap_weights()

    def expect_transfer(self) -> bool:
        """Prepare for weights that come by NCCL; return whether the server is in a group with the trainer.

        One that has died or hangs is started again, and is in none.
        """
        self._worker.interrupted()
        return self._server.expect_transfer()

    def meeting(self) -> Meeting:
        """Return how the server enters an NCCL group."""
        return self._server.meeting

    def enter_link(self, invitation: Invitation) -> None:
        """Enter an NCCL group with the trainer; the processes of all replicas follow rank 0 in the replicas' order."""
        n_devices = self._spec.tp * self._spec.pp
        self._server.enter(invitation, 1 + int(os.environ["RANK"]) * n_devices)

    @property
    def _server(self) -> ServerEngine:
        """The engine, which is a server: no other engine enters an NCCL group."""
        from fivefold.rollout.servers.engine import ServerEngine

        assert isinstance(self._worker.engine, ServerEngine)
        return self._worker.engine
