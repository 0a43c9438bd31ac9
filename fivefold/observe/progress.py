"""How far this process is with something that takes long: loading or saving weights, generating, a server's start.

    with counting("loading weights", sum(tensor.nbytes for tensor in tensors)) as count:
        for tensor in tensors:
            ...
            count(tensor.nbytes)

Any thread of the process can ask meanwhile: `current_progress()`. The driver asks its workers in this way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LEAST_SHARE = 0.02
"""Share of the whole from which on the time left is estimated: the beginning says too little."""

Count = Callable[[int], None]
"""Is told of each number of units that have been done, by any thread."""


@dataclass(frozen=True)
class Progress:
    """Something that takes long, while it goes on."""

    action: str
    """What is being done, such as `loading weights`."""
    done: int
    total: int
    """Units in all; 0: nothing can be counted."""
    seconds: float
    """How long it has taken so far."""

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
    """One thing that is being counted."""

    def __init__(self, action: str, total: int) -> None:
        self._action = action
        self._done = 0
        self._total = total
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def add(self, n: int) -> None:
        with self._lock:
            self._done += n

    def progress(self) -> Progress:
        return Progress(self._action, self._done, self._total, time.monotonic() - self._began)


_counters: list[_Counter] = []
"""What this process counts, the innermost last."""


@contextmanager
def counting(action: str, total: int = 0) -> Iterator[Count]:
    """Let `current_progress` tell of the block, which is given a function for what it has done.

    Args:
        action: what is being done, as people read it.
        total: units in all; 0: nothing can be counted.
    """
    counter = _Counter(action, total)
    _counters.append(counter)
    try:
        yield counter.add
    finally:
        _counters.remove(counter)


def current_progress() -> Progress | None:
    """Return how far this process is with the innermost thing that it counts; None if it counts nothing."""
    counters = tuple(_counters)
    return counters[-1].progress() if counters else None
