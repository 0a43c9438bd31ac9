"""The workers of one role, called together.

    call         every rank, the same arguments        -> results of all ranks
    call_first   every rank, the same arguments        -> rank 0's result; the other ranks send none
    call_each    every rank, its own arguments         -> results of some ranks
    keep_each    every rank, its own arguments         -> summaries, and references to what some leave in the store
    control      every rank, in a second thread        -> results of all ranks
    stream       every rank iterates in lock-step      -> references to what rank 0 yields
    feed         every rank iterates over a stream     -> results of all ranks
    feed_beside  the same, in a second thread          -> results of all ranks
    keep_on      one rank, without waiting             -> a call; first_kept waits for the first of several

A call names a method of the class that the workers hold, `group.call_first(TrainerWorker.update, loss)`, or of a `Part`
of it, so that types and go-to-definition work. `start` is `call` without waiting. Any failure of any worker of the
session ends every wait with a `WorkerError`, and all workers with it. A session's groups may be called from several
threads.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeAlias, TypeVar

import ray
from ray import cloudpickle

from fivefold.cluster.errors import Member
from fivefold.cluster.failures import Call
from fivefold.cluster.nodes import Node
from fivefold.cluster.role import Part, Role, import_folders, master_environment, master_host, worker_environment
from fivefold.cluster.watch import Watch
from fivefold.cluster.worker import SIDES, Worker
from fivefold.observe.timers import PhaseTimers

P = ParamSpec("P")
R = TypeVar("R")

STREAM_AHEAD = 2
"""Items by which rank 0 may be ahead of a stream's reader. It bounds the stream's memory."""
_INLINE = (bool, int, float, str, type(None))
"""Argument types that travel with the call. All others are put into the object store once for all ranks."""

Remote: TypeAlias = "ray.ObjectRef[Any]"
"""Reference to an object in the object store. A worker that receives one as an argument gets the object itself."""

_feed_ids = itertools.count(1)

# `nodes.reserve` reserves devices, so a worker claims none. A worker that dies ends the run instead of restarting.
_OPTIONS: dict[str, Any] = {
    "num_cpus": 0,
    "num_gpus": 0,
    "max_restarts": 0,
    "concurrency_groups": SIDES,
}
_FEED = {"concurrency_group": "feed"}
_CONTROL = {"concurrency_group": "control"}
_Actor = ray.remote(**_OPTIONS)(Worker)


class Host(Protocol):
    """What a group needs of its session."""

    nodes: tuple[Node, ...]
    logs: Path
    timers: PhaseTimers
    watch: Watch
    timeout_s: float
    """Longest time, in seconds, that a call may take."""


class Pending(Generic[R]):
    """Calls in progress. Their results can be waited for once."""

    def __init__(self, session: Host, refs: Sequence[ray.ObjectRef[R]], phase: str) -> None:
        self._session = session
        self._refs = refs
        self._phase = phase

    def wait(self) -> list[R]:
        """Return the results by rank.

        Raises:
            WorkerError: some worker of the session raised or died; all workers have been ended.
            PhaseTimeout: `scheduler.timeout_s` passed first; all workers have been ended.
        """
        return self._session.watch.wait(self._refs, self._phase, self._session.timeout_s)


@dataclass(frozen=True, eq=False)
class KeptCall(Generic[R]):
    """A call in progress on one rank, which returns a pair (summary, payload)."""

    rank: int
    summary: ray.ObjectRef[R]
    payload: Remote
    """Reference to the payload, which stays in the object store while the reference is held."""
    phase: str
    began: float
    """Monotonic time of the call."""


class WorkerGroup:
    """The workers of one role, started by `Session.launch`. Calls that wait raise what `Pending.wait` raises."""

    def __init__(self, session: Host, role: Role) -> None:
        if not role.devices:
            raise ValueError(f"role {role.name!r} has no devices: a role needs at least one process")
        self.name = role.name
        self._session = session
        self._role = role
        self._nodes = [session.nodes[devices[0].node] for devices in role.processes()]
        self.members = [
            Member(role.name, rank, node.host, session.logs / f"{role.name}-{rank}.log", node.strategy)
            for rank, node in enumerate(self._nodes)
        ]
        """The processes, rank 0 first."""
        self._master = master_host(session.nodes, self._nodes[0])
        self._handles: list[Any] = []
        self._built: Pending[float] | None = None
        self._ports: Pending[int] | None = None

    def __len__(self) -> int:
        return len(self.members)

    def create(self) -> None:
        """Request the processes. The ranks of a distributed role begin to import its module."""
        folders = import_folders()
        for rank, (member, node) in enumerate(zip(self.members, self._nodes, strict=True)):
            environment = worker_environment(self._role, rank, self._session.nodes)
            worker = _Actor.options(scheduling_strategy=node.strategy).remote(environment, folders, str(member.log))
            self._handles.append(worker)
            self._session.watch.add(worker.hold.options(concurrency_group="hold").remote(), Call(member, None, worker))
        if self._role.distributed:
            hosts = [self._master] + [None] * (len(self) - 1)
            refs = [
                worker.rendezvous.remote(host, self._role.imports)
                for worker, host in zip(self._workers, hosts, strict=True)
            ]
            self._ports = self._pend(refs)

    def build(self) -> None:
        """Ask every worker to build its object."""
        environment: Mapping[str, str] = {}
        if self._ports is not None:
            environment = master_environment(self._master, self._ports.wait()[0])
        pickled = cloudpickle.dumps(self._role.build)
        args = ray.put(self._role.args)
        self._built = self._pend([worker.build.remote(pickled, environment, args) for worker in self._workers])

    def ready(self) -> float:
        """Wait until every worker has built its object. Returns the seconds of the slowest."""
        return 0.0 if self._built is None else max(self._built.wait())

    def start(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """Do what `call` does, without waiting."""
        shared = _put(args)
        return self._pend([worker.call.remote(_address(method), True, kwargs, *shared) for worker in self._workers])

    def call(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run `method(*args, **kwargs)` on every rank; arguments are sent once. Returns the results by rank."""
        return self.start(method, *args, **kwargs).wait()

    def call_first(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Do what `call` does for a method with the same result on every rank, which only rank 0 sends."""
        shared = _put(args)
        calls = [
            worker.call.remote(_address(method), rank == 0, kwargs, *shared)
            for rank, worker in enumerate(self._workers)
        ]
        return self._pend(calls).wait()[0]

    def call_each(
        self, method: Callable[..., R], arguments: Sequence[tuple[Any, ...]], wanted: Sequence[int]
    ) -> list[R]:
        """Run `method(*arguments[rank])` on every rank.

        Args:
            method: the method.
            arguments: the arguments of each rank. A tuple that several ranks have is sent once. The worker of an
                argument that is a `Remote` reads the object itself from the object store.
            wanted: the ranks whose results are wanted. The others send none.

        Returns:
            The results of these ranks, in their order.

        Raises:
            ValueError: there is not one tuple for each rank.
        """
        self._check_one_each(arguments)
        calls = [
            worker.call_with.remote(_address(method), rank in wanted, args)
            for rank, (worker, args) in enumerate(zip(self._workers, _put_shared(arguments), strict=True))
        ]
        results = self._pend(calls).wait()
        return [results[rank] for rank in wanted]

    def keep_each(
        self, method: Callable[..., tuple[R, Any]], arguments: Sequence[tuple[Any, ...]], keepers: Sequence[int]
    ) -> list[tuple[R, Remote]]:
        """Run `method(*arguments[rank])`, which returns a pair (summary, payload), on every rank.

        The payload stays in the object store for as long as its reference is held; only the summary is sent back.

        Args:
            method: the method.
            arguments: the arguments of each rank, as in `call_each`.
            keepers: the ranks whose pairs are wanted. Other ranks have the same, and put nothing into the store.

        Returns:
            (summary, reference to the payload) of each of the keepers, in their order.

        Raises:
            ValueError: there is not one tuple for each rank.
        """
        self._check_one_each(arguments)
        wanted = set(keepers)
        pairs = [
            worker.keep_with.remote(_address(method), rank in wanted, args)
            for rank, (worker, args) in enumerate(zip(self._workers, _put_shared(arguments), strict=True))
        ]
        summaries = self._pend([summary for summary, _ in pairs]).wait()
        return [(summaries[rank], pairs[rank][1]) for rank in keepers]

    def keep_on(
        self, rank: int, method: Callable[Concatenate[Any, P], tuple[R, Any]], *args: P.args, **kwargs: P.kwargs
    ) -> KeptCall[R]:
        """Start `method(*args, **kwargs)`, which returns a pair (summary, payload), on one rank."""
        worker, phase = self._workers[rank], self._session.timers.current
        summary, payload = worker.keep.remote(_address(method), True, kwargs, *args)
        self._pend([summary], [rank])
        return KeptCall(rank, summary, payload, phase, time.monotonic())

    def first_kept(self, calls: Sequence[KeptCall[R]]) -> tuple[KeptCall[R], R]:
        """Wait for the first of some calls on single ranks, listed oldest first. Return it and its summary.

        Raises:
            WorkerError: some worker of the session raised or died; all workers have been ended.
            PhaseTimeout: none returned within `scheduler.timeout_s`; all workers have been ended.
        """
        by_ref = {call.summary: call for call in calls}
        first = calls[0]
        ref, summary = self._session.watch.wait_any(
            list(by_ref), first.phase, self._session.timeout_s, first.began
        )  # fmt: skip
        return by_ref[ref], summary

    def control(self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Run `method(*args, **kwargs)` on every rank at once, in a second thread of the worker.

        The method runs in parallel with the one in progress, which the held object must allow. Returns the results by
        rank.
        """
        shared = _put(args)
        calls = [
            worker.control.options(**_CONTROL).remote(_address(method), kwargs, *shared) for worker in self._workers
        ]
        return self._pend(calls).wait()

    def stream(
        self, method: Callable[Concatenate[Any, P], Iterator[Any]], *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[Remote]:
        """Run the generator `method(*args, **kwargs)` on every rank; yield references to the items of rank 0.

        Rank 0 is at most `STREAM_AHEAD` items ahead of the reader, and so are the others if the generator contains
        collectives. The reader must read to the end.
        """
        shared = _put(args)
        name = _address(method)
        first, *others = self._workers
        options = {"num_returns": "streaming", "_generator_backpressure_num_objects": 2 * STREAM_AHEAD}
        items = first.stream.options(**options).remote(name, kwargs, *shared)
        drained = self._pend([worker.drain.remote(name, kwargs, *shared) for worker in others], range(1, len(self)))
        call = Call(self.members[0], self._session.timers.current, first)
        while (item := self._session.watch.next(items, call, self._session.timeout_s)) is not None:
            yield item
        drained.wait()

    def feed(
        self,
        method: Callable[Concatenate[Any, Iterator[Any], P], R],
        items: Iterable[Remote],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Run `method(iterator, *args, **kwargs)` on every rank, where the iterator yields what `items` refer to.

        An item is released once every rank has taken it. Returns the results by rank.
        """
        return self._feed(None, _address(method), items, kwargs, args)

    def feed_beside(
        self,
        method: Callable[Concatenate[Any, Iterator[Any], P], R],
        items: Iterable[Remote],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Do what `feed` does in a second thread of each worker, in parallel with the method in progress.

        The held object must allow that. A worker has one feed at a time.
        """
        return self._feed("control", _address(method), items, kwargs, args)

    def _feed(
        self, side: str | None, method: str, items: Iterable[Remote], kwargs: Mapping[str, Any], args: Sequence[Any]
    ) -> list[Any]:
        """Feed a method that runs in the thread of `side`; None: in the main one."""
        feed_id = next(_feed_ids)
        shared = _put(args)
        options = {} if side is None else {"concurrency_group": side}
        running: Pending[Any] = self._pend(
            [
                worker.consume.options(**options).remote(feed_id, method, True, kwargs, *shared)
                for worker in self._workers
            ]
        )
        for item in items:
            self._pend([worker.push.options(**_FEED).remote(feed_id, item) for worker in self._workers]).wait()
        self._pend([worker.push_end.options(**_FEED).remote(feed_id) for worker in self._workers]).wait()
        return running.wait()

    def kill(self) -> None:
        """End the processes at once."""
        for worker in self._handles:
            ray.kill(worker)
        self._handles = []

    @property
    def _workers(self) -> list[Any]:
        """Handles of the processes by rank. Raises the failure that has ended them, perhaps in another thread."""
        self._session.watch.check()
        return self._handles

    def _check_one_each(self, arguments: Sequence[tuple[Any, ...]]) -> None:
        if len(arguments) != len(self):
            raise ValueError(
                f"role {self.name!r} got arguments for {len(arguments)} ranks, but has {len(self)}: "
                "give a tuple for each rank"
            )

    def _pend(self, refs: Sequence[ray.ObjectRef[Any]], ranks: Iterable[int] | None = None) -> Pending[Any]:
        phase = self._session.timers.current
        for rank, ref in zip(range(len(self)) if ranks is None else ranks, refs, strict=True):
            self._session.watch.add(ref, Call(self.members[rank], phase, self._workers[rank]))
        return Pending(self._session, refs, phase)


def _address(method: Callable[..., Any]) -> str:
    """Return what names a method to the workers: its name, and of a `Part` its module and class too."""
    owner = getattr(sys.modules[method.__module__], method.__qualname__.partition(".")[0], None)
    is_part = isinstance(owner, type) and issubclass(owner, Part)
    return f"{method.__module__}:{method.__qualname__}" if is_part else method.__name__


def put(value: Any) -> Remote:
    """Put `value` into the object store, as an argument of calls."""
    return ray.put(value)


def fetch(reference: Remote) -> Any:
    """Return an object of the object store; arrays of an object on this machine are not copied."""
    return ray.get(reference)


def _put(args: Sequence[Any]) -> list[Any]:
    """Put arguments into the object store, once for all ranks. Small ones are returned unchanged."""
    return [arg if isinstance(arg, (*_INLINE, ray.ObjectRef)) else ray.put(arg) for arg in args]


def _put_shared(arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Put each tuple that several ranks have into the object store, once. The others are returned unchanged.

    Ray looks at every reference among the arguments of every call, and pickles all others for each rank. For a thousand
    ranks that would take seconds.
    """
    n_ranks = Counter(map(id, arguments))
    distinct = {id(args): args for args in arguments}
    shared = {key: ray.put(args) for key, args in distinct.items() if n_ranks[key] > 1}
    return [shared.get(id(args), args) for args in arguments]
