"""How far this process is with something that takes long: loading or saving weights, generating, a server's start.

    with counting("loading weights", sum(tensor.nbytes for tensor in tensors)) as count:
        for tensor in tensors:
            ...
            count(tensor.nbytes)

Meanwhile any thread of the process can call `current_progress()`, which is how the driver asks its workers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LEAST_SHARE = 0.02
"""Least share that must be done before the time left is estimated."""

Count = Callable[[int], None]
"""Adds a number of units that have been done; any thread may call it."""


@dataclass(frozen=True)
class Progress:
    """A long action in progress."""

    action: str
    """The action, such as `loading weights`."""
    done: int
    total: int
    """Units in all; 0: nothing can be counted."""
    seconds: float
    """Time that it has taken so far."""

    @property
    def share(self) -> float | None:
        """Share that is done, 0 to 1; None if nothing can be counted."""
        return min(self.done / self.total, 1.0) if self.total else None

    @property
    def seconds_left(self) -> float | None:
        """The estimated rest; None while too little is done for an estimate."""
        if self.share is None or self.share < LEAST_SHARE:
            return None
        return self.seconds * (1 / self.share - 1)


class _Counter:
    """An action that is being counted."""

    def __init__(self, action: str, total: int) -> None:
        self._action = action
        self._done = 0
        self._total = total
        self._began = time.perf_counter()
        self._lock = threading.Lock()

    def add(self, n: int) -> None:
        with self._lock:
            self._done += n

    def progress(self) -> Progress:
        return Progress(self._action, self._done, self._total, time.perf_counter() - self._began)


_counters: list[_Counter] = []
"""The actions that this process counts, innermost last."""


@contextmanager
def counting(action: str, total: int = 0) -> Iterator[Count]:
    """Let `current_progress` report the block, which gets a function that counts what it has done.

    Args:
        action: what is being done, in words.
        total: units in all; 0: nothing can be counted.
    """
    counter = _Counter(action, total)
    _counters.append(counter)
    try:
        yield counter.add
    finally:
        _counters.remove(counter)


def current_progress() -> Progress | None:
    """Return the progress of the innermost action that this process counts; None if it counts nothing."""
    counters = tuple(_counters)
    return counters[-1].progress() if counters else None
