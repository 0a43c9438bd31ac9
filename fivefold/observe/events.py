"""When each process of a run did what: the events from which a time line is drawn.

logs/driver.events, logs/<role>-<rank>.events       one line an event, written as it ends

    {"name": "update", "start": 1700000000.123, "seconds": 0.81, "thread": 0}
    {"step": 12, "at": 1700000001.004}                                          the driver, at the end of a step

Start and end are on the clock of the process's machine. An event costs about 20 microseconds.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SUFFIX = ".events"


class EventLog:
    """The events of one process, to which several of its threads may add."""

    def __init__(self, path: Path) -> None:
        """Begin a new file, in the place of an earlier one."""
        self._file = path.open("w", buffering=1, encoding="utf-8")
        self._threads: dict[int, int] = {}
        self._lock = threading.Lock()

    @contextmanager
    def event(self, name: str) -> Iterator[None]:
        """Record the time of the block, also of one that fails."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began)

    def add(self, name: str, seconds: float) -> None:
        """Record an event that took `seconds` and has just ended."""
        start = time.time() - seconds
        with self._lock:
            thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
            line = {"name": name, "start": round(start, 6), "seconds": round(seconds, 6), "thread": thread}
            self._file.write(json.dumps(line) + "\n")

    def step_ended(self, step: int) -> None:
        """Record that `step` has ended."""
        with self._lock:
            self._file.write(json.dumps({"step": step, "at": round(time.time(), 6)}) + "\n")

    def close(self) -> None:
        """Close the file; what other threads add later is dropped."""
        with self._lock:
            self._file.close()
