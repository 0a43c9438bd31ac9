"""A gate between a thread that keeps replicas at work and the one that takes their devices away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Lets calls pass while it is open. `close` returns once no call is on its way."""

    def __init__(self) -> None:
        """Begin open."""
        self._changed = threading.Condition()
        self._is_open = True
        self._has_ended = False

    @contextmanager
    def passing(self) -> Iterator[bool]:
        """Wait until the gate is open, and keep it open inside the block. Yields False once the gate has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_open or self._has_ended)
            yield not self._has_ended

    def open(self) -> None:
        """Let calls pass."""
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def close(self) -> None:
        """Let no call pass before `open`."""
        with self._changed:
            self._is_open = False

    def end(self) -> None:
        """Let those who wait go, because there are no more calls."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
