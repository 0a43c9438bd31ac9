"""When each process of a run did what: the events from which a time line is drawn.

logs/driver.events, logs/<role>-<rank>.events       one line an event, written as it ends

    {"name": "train", "start": 1700000000.123, "seconds": 0.81, "thread": "main"}
    {"name": "rewards", "start": 1700000000.204, "seconds": 0.03, "thread": "rewards"}
    {"step": 12, "at": 1700000001.004}                                          the driver, at the end of a step

Events of one thread lie one behind the other, or within each other: what goes on beside has a thread of its own.
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
MAIN = "main"
"""Name of the thread that does a process's own work."""


class EventLog:
    """The events of one process, to which several of its threads may add."""

    def __init__(self, path: Path, *, names_threads: bool = False) -> None:
        """Begin a new file, in the place of an earlier one.

        Args:
            path: the file.
            names_threads: whether the main thread's events are told from those of other threads, which have the names
                that the program gives them; otherwise each event says its thread, or is the main one's.
        """
        self._file = path.open("w", buffering=1, encoding="utf-8")
        self._names_threads = names_threads
        self._lock = threading.Lock()

    @contextmanager
    def event(self, name: str, thread: str = MAIN) -> Iterator[None]:
        """Record the time of the block, also of one that fails."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began, thread)

    def add(self, name: str, seconds: float, thread: str = MAIN) -> None:
        """Record an event that took `seconds` and has just ended."""
        start = time.time() - seconds
        thread = _thread_name() if self._names_threads else thread
        line = {"name": name, "start": round(start, 6), "seconds": round(seconds, 6), "thread": thread}
        with self._lock:
            self._file.write(json.dumps(line) + "\n")

    def step_ended(self, step: int) -> None:
        """Record that `step` has ended."""
        with self._lock:
            self._file.write(json.dumps({"step": step, "at": round(time.time(), 6)}) + "\n")

    def close(self) -> None:
        """Close the file; what other threads add later is dropped."""
        with self._lock:
            self._file.close()


def _thread_name() -> str:
    """Return what the current thread does: its name, or that of the pool whose only thread it is."""
    thread = threading.current_thread()
    return MAIN if thread is threading.main_thread() else thread.name.removesuffix("_0")
