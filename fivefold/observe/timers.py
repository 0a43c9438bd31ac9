"""Timers of a step's phases, which also know the phases in progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fivefold.observe.events import EventLog

SETUP = "setup"


@dataclass
class _Lane(threading.local):
    """The phases of one thread: the open ones, the innermost last, and the seconds spent inside the current one."""

    stack: list[str] = field(default_factory=lambda: [SETUP])
    inner: float = 0.0


class PhaseTimers:
    """Seconds per phase of one step, on the driver's clock.

        timers = PhaseTimers()
        with timers.phase("rollout"):
            samples = rollout.generate(prompts, ...)
        timers.take()                       # {"rollout": 3.21}, and the next step starts at zero

    `current` names the phase in worker errors and on the console. Phases may nest; the time of an inner phase does not
    count for the outer one, so that the seconds of all phases of one thread add up to the time that passed. Several
    threads may each be in phases of their own (generation beside training): their seconds are added up by name.
    """

    def __init__(self, on_change: Callable[[str], None] | None = None, events: EventLog | None = None) -> None:
        """Start without phases.

        Args:
            on_change: is called, in the thread that enters or leaves a phase, with the names of all open phases.
            events: records every phase; None: none is recorded.
        """
        self._seconds: dict[str, float] = {}
        self._lane = _Lane()
        self._innermost: dict[int, str] = {}
        """The innermost phase of each thread that is in one, by the thread's id."""
        self._lock = threading.Lock()
        self._on_change = on_change
        self._events = events

    @property
    def current(self) -> str:
        """Innermost open phase of this thread; `setup` outside of any."""
        return self._lane.stack[-1]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block for phase `name`; a phase that is entered twice in a step adds up."""
        lane = self._lane
        lane.stack.append(name)
        self._tell()
        start, inner_before = time.perf_counter(), lane.inner
        lane.inner = 0.0
        yield
        # A failure skips this, so that its message can name the phase in which it happened.
        elapsed = time.perf_counter() - start
        if self._events is not None:
            self._events.add(name, elapsed)
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed - lane.inner
        lane.inner = inner_before + elapsed
        lane.stack.pop()
        self._tell()

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase that ended since the last `take`, in the order in which they ended."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return seconds

    def _tell(self) -> None:
        with self._lock:
            thread = threading.get_ident()
            if len(self._lane.stack) > 1:
                self._innermost[thread] = self.current
            else:
                self._innermost.pop(thread, None)
            under_way = " + ".join(dict.fromkeys(self._innermost.values())) or self.current
        if self._on_change is not None:
            self._on_change(under_way)
