"""The shell of a worker process: holds one object and calls its methods for the driver.

    driver ──build───> Worker ──makes──> engine          once, inside the process
           ──call────>        ──runs───> engine.method(*args)
           ──keep────>        ──runs───> engine.method(*args) -> (summary, payload), the payload stays in Ray's store
           ──*_with──>        ──runs───> the same with arguments that several ranks have
           ──stream──>        ──runs───> generator       rank 0 yields to the driver, the others drain theirs
           ──feed────>        ──runs───> engine.method(iterator, *args), while `push` hands in the items
           ──control─>        ──runs───> engine.method(*args) in a second thread, in parallel with another method

Nothing heavy is imported here: the environment (visible device, threads) is set before `build` imports torch.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray import cloudpickle

from fivefold.cluster.interrupt import keep_exit_statuses
from fivefold.cluster.role import LOOPBACK
from fivefold.imports import large_imports
from fivefold.observe.progress import Progress, counting, current_progress
from fivefold.observe.timers import MAIN, SUFFIX, EventLog

SIDES = {"feed": 1, "control": 2, "where": 1, "hold": 1}
"""Ray's concurrency groups of a worker, with their threads, for methods that run in parallel with the one in progress.
`control` writes a checkpoint and sends weights at the same time."""

STACK_FRAMES = 8


class Feed:
    """An iterator whose items are handed in by another thread, one at a time."""

    _END = object()

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._changed = threading.Condition()
        self._closed = False

    def put(self, item: Any) -> None:
        """Hand in one item; return once it was taken, or at once if the reader has ended."""
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._items or self._closed)

    def end(self) -> None:
        """Tell the reader that no item follows."""
        self.put(self._END)

    def close(self) -> None:
        """Record that the reader takes no more items, which ends all waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._items))
                item = self._items.pop(0)
                self._changed.notify_all()
            if item is self._END:
                return
            yield item


class Worker:
    """One process of a role. `build`, `call`, `keep` and the like run one by one in one thread.

    `push`, `push_end`, `control`, `where`, `progress` and `hold` run in parallel with them, in the threads of `SIDES`.
    """

    def __init__(self, environment: Mapping[str, str], folders: Sequence[str], log: str) -> None:
        os.environ.update(environment)
        sys.path.extend(folder for folder in folders if folder not in sys.path)
        with _Reported():
            _redirect_output(Path(log))
            self._events = EventLog(Path(log).with_suffix(SUFFIX))
        keep_exit_statuses()
        self._held: Any = None
        self._parts: dict[str, Any] = {}
        """The parts of the held object that were called, by module and class."""
        self._parts_lock = threading.Lock()
        self._store: Any = None
        self._thread = 0
        self._sides: set[int] = set()
        """Numbers of the methods that run in parallel with the one in progress."""
        self._sides_lock = threading.Lock()
        self._feeds: dict[int, Feed] = {}
        self._feeds_lock = threading.Lock()

    def rendezvous(self, host: str | None, imports: str) -> int:
        """Open the store of torch.distributed on a free port of rank 0, and import a module.

        The store is kept open for torch.distributed, so that no other process can take the port in between.

        Args:
            host: address of the store; None on the other ranks, which open none.
            imports: the module.

        Returns:
            The port; 0 on the other ranks.
        """
        with large_imports():
            from torch.distributed import TCPStore  # type: ignore[attr-defined]

            importlib.import_module(imports)

        if host is None:
            return 0
        # The store listens on all interfaces, which other machines need, unless it gets a socket.
        listener = None if host != LOOPBACK else socket.create_server((host, 0)).detach()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, master_listen_fd=listener)
        return int(self._store.port)

    def build(self, pickled: bytes, environment: Mapping[str, str], args: tuple[Any, ...]) -> float:
        """Build the held object, `build(*args)`. Returns the seconds that it took."""
        began = time.perf_counter()
        self._thread = threading.get_ident()
        os.environ.update(environment)
        with self._recorded("build"), counting("starting"):
            with large_imports():
                build = cloudpickle.loads(pickled)
                if isinstance(build, str):
                    module, _, name = build.partition(":")
                    build = getattr(importlib.import_module(module), name)
            self._held = build(*args)
        return time.perf_counter() - began

    def call(self, method: str, reply: bool, kwargs: Mapping[str, Any], *args: Any) -> Any:
        """Return `held.method(*args, **kwargs)`, or None unless `reply`."""
        with self._running(method) as run:
            result = run(*args, **kwargs)
        return result if reply else None

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    def keep(self, method: str, reply: bool, kwargs: Mapping[str, Any], *args: Any) -> tuple[Any, Any]:
        """Return the pair (summary, payload) of `held.method(*args, **kwargs)`, as two objects of the store.

        Unless `reply`, both are None.
        """
        with self._running(method) as run:
            summary, payload = run(*args, **kwargs)
        return (summary, payload) if reply else (None, None)

    def call_with(self, method: str, reply: bool, args: Sequence[Any]) -> Any:
        """Do what `call` does with arguments, reading references among them from the store."""
        return self.call(method, reply, {}, *_read(args))

    @ray.method(num_returns=2)  # type: ignore[untyped-decorator]
    def keep_with(self, method: str, reply: bool, args: Sequence[Any]) -> tuple[Any, Any]:
        """Do what `keep` does with arguments, reading references among them from the store."""
        return self.keep(method, reply, {}, *_read(args))

    def control(self, method: str, kwargs: Mapping[str, Any], *args: Any) -> Any:
        """Return `held.method(*args, **kwargs)` at once, in parallel with another method if one runs."""
        with self._running(method) as run:
            return run(*args, **kwargs)

    def stream(self, method: str, kwargs: Mapping[str, Any], *args: Any) -> Iterator[Any]:
        """Yield the items of the generator `held.method`, a None before each.

        The driver reads the None, which fails if the generator has failed, and passes the item on without reading it.
        """
        with self._running(method) as run:
            for item in run(*args, **kwargs):
                yield None
                yield item

    def drain(self, method: str, kwargs: Mapping[str, Any], *args: Any) -> None:
        """Run the generator `held.method` to its end and drop the items."""
        with self._running(method) as run:
            for _ in run(*args, **kwargs):
                pass

    def consume(self, feed_id: int, method: str, reply: bool, kwargs: Mapping[str, Any], *args: Any) -> Any:
        """Return `held.method(items, *args, **kwargs)`, with the items that `push` hands in under `feed_id`."""
        feed = self._feed(feed_id)
        try:
            with self._running(method) as run:
                result = run(iter(feed), *args, **kwargs)
        finally:
            feed.close()
        return result if reply else None

    def push(self, feed_id: int, item: Any) -> None:
        """Hand one item to `consume`; return once it was taken."""
        self._feed(feed_id).put(item)

    def push_end(self, feed_id: int) -> None:
        """Tell `consume` that no item follows."""
        self._feed(feed_id).end()

    def progress(self) -> Progress | None:
        """Return the progress of what this process counts; None if it counts nothing."""
        return current_progress()

    def where(self) -> str:
        """Return the innermost Python frames of the call in progress."""
        stack = traceback.extract_stack(sys._current_frames().get(self._thread))
        shell = max((index for index, frame in enumerate(stack) if frame.filename == __file__), default=-1)
        return "".join(traceback.format_list(stack[shell + 1 :][-STACK_FRAMES:]))

    def hold(self) -> None:
        """Never return, so that the driver's reference fails as soon as the process dies, whatever it is doing."""
        threading.Event().wait()

    @contextmanager
    def _running(self, method: str) -> Iterator[Callable[..., Any]]:
        """Yield a method of the held object or of a part of it; record its time, and report its failure."""
        with self._recorded(method.rpartition(":")[2]):
            yield self._find(method)

    @contextmanager
    def _recorded(self, name: str) -> Iterator[None]:
        """Record the time of a block among the events, and report its failure."""
        with self._row() as row, self._events.event(name, row), _Reported():
            yield

    def _find(self, address: str) -> Callable[..., Any]:
        """Return the method of an address, `method` or, of a part, `module:class.method`."""
        place, _, name = address.rpartition(".")
        if ":" not in place:
            return getattr(self._held, address)
        with self._parts_lock:
            if place not in self._parts:
                module, _, part = place.partition(":")
                self._parts[place] = getattr(importlib.import_module(module), part)(self._held)
        return getattr(self._parts[place], name)

    @contextmanager
    def _row(self) -> Iterator[str]:
        """Yield the thread's name among the events. Methods that run in parallel have different ones."""
        if threading.get_ident() == self._thread:
            yield MAIN
            return
        with self._sides_lock:
            number = next(number for number in count(1) if number not in self._sides)
            self._sides.add(number)
        try:
            yield "parallel" if number == 1 else f"parallel {number}"
        finally:
            with self._sides_lock:
                self._sides.remove(number)

    def _feed(self, feed_id: int) -> Feed:
        # `push` may come before `consume`, so the first of them makes the feed. Older feeds have ended.
        with self._feeds_lock:
            if feed_id not in self._feeds:
                self._feeds = {feed_id: Feed()}
            return self._feeds[feed_id]


def _read(args: Sequence[Any]) -> list[Any]:
    """Return arguments with what references among them refer to."""
    values = iter(ray.get([arg for arg in args if isinstance(arg, ray.ObjectRef)]))
    return [next(values) if isinstance(arg, ray.ObjectRef) else arg for arg in args]


class HeldError(Exception):
    """An exception of the held object as text, so that any exception can travel, without the frames of this file."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class _Reported:
    """Writes an exception of its block to this worker's log, and raises it as a `HeldError`."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception):
            return
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace))
        print(text, file=sys.stderr, flush=True)
        raise HeldError(text) from None


def _redirect_output(log: Path) -> None:
    """Send standard output and error of this process, also of native code, to `log`."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = log.open("w", buffering=1)
    except OSError as error:
        raise ValueError(
            f"this process cannot write its log on this machine ({error}): set cluster.fileroot to a folder that can "
            "be written on every node, best on storage that all nodes share"
        ) from error
    for descriptor in (1, 2):
        os.dup2(file.fileno(), descriptor)
    sys.stdout = sys.stderr = file
    faulthandler.enable(file)
