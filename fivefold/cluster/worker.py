"""The shell of a worker process: holds one object and calls its methods for the driver.

    driver ──build───> Worker ──makes──> engine          once, inside the process
           ──call────>        ──runs───> engine.method(*args)
           ──keep────>        ──runs───> engine.method(*args) -> (summary, payload), the payload stays in Ray's store
           ──stream──>        ──runs───> generator       rank 0 yields to the driver, the others drain theirs
           ──feed────>        ──runs───> engine.method(iterator, *args), while `push` hands in the items
           ──control─>        ──runs───> engine.method(*args) in a second thread, beside whatever else runs

Nothing heavy is imported here: the environment (visible device, threads) is set first, then `build` imports torch.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ray import cloudpickle

from fivefold.cluster.interrupt import keep_exit_statuses

SIDES = {"feed": 1, "control": 1, "where": 1, "hold": 1}
"""Ray's concurrency groups of a worker, a thread each: methods that are called beside the one under way."""

Build = str | Callable[..., Any]
"""Makes the object that a worker holds: `module:function`, or a callable that cloudpickle can carry."""

STACK_FRAMES = 8


class Feed:
    """An iterator whose items are handed in by another thread, one at a time."""

    _END = object()

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._changed = threading.Condition()
        self._closed = False

    def put(self, item: Any) -> None:
        """Hands in one item and returns once it was taken, or at once if the reader has gone."""
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._items or self._closed)

    def end(self) -> None:
        """No item follows."""
        self.put(self._END)

    def close(self) -> None:
        """The reader takes no more; whoever waits in `put` goes on."""
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
    """One process of a role. `build`, `call`, `keep`, `stream`, `drain` and `consume` run one by one in one thread.

    `push`, `push_end`, `control`, `where` and `hold` run in the groups of `SIDES`: they serve the driver meanwhile.
    """

    def __init__(self, environment: Mapping[str, str], log: str) -> None:
        os.environ.update(environment)
        _redirect_output(Path(log))
        keep_exit_statuses()
        self._held: Any = None
        self._store: Any = None
        self._thread = 0
        self._feeds: dict[int, Feed] = {}
        self._feeds_lock = threading.Lock()

    def rendezvous(self, host: str | None) -> int:
        """Opens the store that the ranks of torch.distributed meet at (rank 0, with its own host), on a free port.

        The listening store is kept and handed over, so that no other process can take the port in between. The other
        ranks get no host and only import torch meanwhile. Returns the port, 0 on the other ranks.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if host is None:
            return 0
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def build(self, pickled: bytes, environment: Mapping[str, str], args: tuple[Any, ...]) -> None:
        """Makes the held object, `build(*args)`."""
        self._thread = threading.get_ident()
        os.environ.update(environment)
        with _Reported():
            build = cloudpickle.loads(pickled)
            if isinstance(build, str):
                module, _, name = build.partition(":")
                build = getattr(importlib.import_module(module), name)
            self._held = build(*args)

    def call(self, method: str, reply: bool, kwargs: Mapping[str, Any], *args: Any) -> Any:
        """`held.method(*args, **kwargs)`; None in place of the result if no `reply` is wanted."""
        with _Reported():
            result = getattr(self._held, method)(*args, **kwargs)
        return result if reply else None

    def keep(self, method: str, kwargs: Mapping[str, Any], *args: Any) -> tuple[Any, Any]:
        """The pair (summary, payload) that `held.method(*args, **kwargs)` returns, as two objects of the store."""
        with _Reported():
            summary, payload = getattr(self._held, method)(*args, **kwargs)
        return summary, payload

    def control(self, method: str, kwargs: Mapping[str, Any], *args: Any) -> Any:
        """`held.method(*args, **kwargs)`, at once: the held object sees to it that the two threads agree."""
        with _Reported():
            return getattr(self._held, method)(*args, **kwargs)

    def stream(self, method: str, kwargs: Mapping[str, Any], *args: Any) -> Iterator[Any]:
        """What the generator `held.method` yields, each item behind a None.

        The driver reads the None, which fails if the generator has, and passes the item on unread.
        """
        with _Reported():
            for item in getattr(self._held, method)(*args, **kwargs):
                yield None
                yield item

    def drain(self, method: str, kwargs: Mapping[str, Any], *args: Any) -> None:
        """Runs the generator `held.method` to its end and drops the items."""
        with _Reported():
            for _ in getattr(self._held, method)(*args, **kwargs):
                pass

    def consume(self, feed_id: int, method: str, reply: bool, kwargs: Mapping[str, Any], *args: Any) -> Any:
        """`held.method(items, *args, **kwargs)`, with the items that `push` hands in under `feed_id`."""
        feed = self._feed(feed_id)
        try:
            with _Reported():
                result = getattr(self._held, method)(iter(feed), *args, **kwargs)
        finally:
            feed.close()
        return result if reply else None

    def push(self, feed_id: int, item: Any) -> None:
        """One item for `consume`; returns once it was taken."""
        self._feed(feed_id).put(item)

    def push_end(self, feed_id: int) -> None:
        """No item follows for `consume`."""
        self._feed(feed_id).end()

    def where(self) -> str:
        """The innermost Python frames of the call that is under way."""
        stack = traceback.extract_stack(sys._current_frames().get(self._thread))
        shell = max((index for index, frame in enumerate(stack) if frame.filename == __file__), default=-1)
        return "".join(traceback.format_list(stack[shell + 1 :][-STACK_FRAMES:]))

    def hold(self) -> None:
        """Never returns: its reference fails as soon as the process dies, whatever the process is doing."""
        threading.Event().wait()

    def _feed(self, feed_id: int) -> Feed:
        # `push` may come before `consume` does: whoever is first makes the feed. Older feeds have ended.
        with self._feeds_lock:
            if feed_id not in self._feeds:
                self._feeds = {feed_id: Feed()}
            return self._feeds[feed_id]


class HeldError(Exception):
    """What a method of the held object raised, as text: any exception can travel, and without the shell's frames."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class _Reported:
    """An exception inside goes to this worker's log and, as a `HeldError`, to the driver."""

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
    """Standard output and error of this process, native code's included, go to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = log.open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(file.fileno(), descriptor)
    sys.stdout = sys.stderr = file
    faulthandler.enable(file)
