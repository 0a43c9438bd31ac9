"""When a run did what, and how long it takes: events of every process, phases of the driver, the pace of the steps.

logs/driver.events, logs/<role>-<rank>.events       one line per event, written as it ends

    {"name": "train", "start": 1700000000.123, "seconds": 0.81, "thread": "main"}
    {"name": "rewards", "start": 1700000000.204, "seconds": 0.03, "thread": "rewards"}
    {"step": 12, "at": 1700000001.004}                                          written by the driver as a step ends

Events of one thread are sequential or nested; parallel work has its own thread. Times are on the clock of the process's
machine. An event costs about 20 microseconds.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

SUFFIX = ".events"
MAIN = "main"
"""The thread that does a process's main work."""
SETUP = "setup"
"""The phase outside of all others."""
EVALUATION = "evaluation"
RECENT = 20
"""Most recent steps that estimate the time left: steps become longer or shorter as answers do."""


class EventLog:
    """The events of one process. Several threads may write."""

    def __init__(self, path: Path, *, names_threads: bool = False) -> None:
        """Open a new file, replacing an earlier one.

        Args:
            path: the file.
            names_threads: take an event's thread from the thread that records it; otherwise the caller names it.
        """
        self._file = path.open("w", buffering=1, encoding="utf-8")
        self._names_threads = names_threads
        self._lock = threading.Lock()

    @contextmanager
    def event(self, name: str, thread: str = MAIN) -> Iterator[None]:
        """Record the time of the block, even if it fails."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began, thread)

    def add(self, name: str, seconds: float, thread: str = MAIN) -> None:
        """Record an event of `seconds` that has just ended."""
        start = time.time() - seconds
        thread = _thread_name() if self._names_threads else thread
        line = {"name": name, "start": round(start, 6), "seconds": round(seconds, 6), "thread": thread}
        with self._lock:
            self._file.write(json.dumps(line) + "\n")

    def step_ended(self, step: int) -> None:
        """Record the end of a step."""
        with self._lock:
            self._file.write(json.dumps({"step": step, "at": round(time.time(), 6)}) + "\n")

    def close(self) -> None:
        """Close the file. Later events of other threads are dropped."""
        with self._lock:
            self._file.close()


def _thread_name() -> str:
    """Return the name of the current thread, or of the pool whose only thread it is."""
    thread = threading.current_thread()
    return MAIN if thread is threading.main_thread() else thread.name.removesuffix("_0")


@dataclass
class _Lane(threading.local):
    """The phases of one thread: the open ones, innermost last, and the seconds spent inside the current one."""

    stack: list[str] = field(default_factory=lambda: [SETUP])
    inner: float = 0.0


class PhaseTimers:
    """Seconds per phase of one step, on the driver's clock.

        timers = PhaseTimers()
        with timers.phase("rollout"):
            source.take(step)
        timers.take()                       # {"rollout": 3.21}; the next step starts at zero

    Phases may nest. The time of an inner phase does not count for the outer one, so the phases of one thread add up to
    the time that passed. Several threads may be in phases at once; their seconds add up by name.
    """

    def __init__(self, events: EventLog | None = None) -> None:
        """Start without phases. `events` records every phase."""
        self._seconds: dict[str, float] = {}
        self._lane = _Lane()
        self._innermost: dict[int, str] = {}
        """The innermost phase of each thread that is in one, by thread id."""
        self._lock = threading.Lock()
        self._events = events
        self.under_way = SETUP
        """Names of the innermost phases of all threads."""
        self.since = time.perf_counter()
        """Time at which `under_way` last changed."""
        self.took: dict[str, float] = {}
        """Seconds that each value of `under_way` lasted the last time."""
        self.ended: dict[str, float] = {}
        """Time at which each value of `under_way` last ended."""

    @property
    def current(self) -> str:
        """Innermost open phase of this thread, for worker errors; `setup` outside of all phases."""
        return self._lane.stack[-1]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block for phase `name`. A phase that is entered twice in a step adds up."""
        lane = self._lane
        lane.stack.append(name)
        self._change()
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
        self._change()

    @contextmanager
    def named(self, name: str) -> Iterator[None]:
        """Call the block a part of phase `name` in errors and on the console; another thread counts its time."""
        self._lane.stack.append(name)
        self._change()
        yield
        self._lane.stack.pop()
        self._change()

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase that ended since the last `take`, in the order in which they ended."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return seconds

    def _change(self) -> None:
        """Record that this thread has entered or left a phase."""
        now = time.perf_counter()
        with self._lock:
            thread = threading.get_ident()
            if len(self._lane.stack) > 1:
                self._innermost[thread] = self.current
            else:
                self._innermost.pop(thread, None)
            self.took[self.under_way], self.ended[self.under_way] = now - self.since, now
            self.under_way = " + ".join(dict.fromkeys(self._innermost.values())) or self.current
            self.since = now


@dataclass(frozen=True)
class TimeLeft:
    """An estimate of the time that the rest of a run takes."""

    seconds: float
    by_first_step: bool
    """Whether only the first step is known, which takes longer than the others."""

    @property
    def doubt(self) -> str:
        """A caveat to append to the estimate, or an empty text."""
        return ", by the first step" if self.by_first_step else ""


def time_left(steps: Sequence[float], n_left: int) -> TimeLeft | None:
    """Estimate the time of the remaining steps; None before the first step and after the last.

    The first step counts only while it is the only one, because it compiles kernels and allocates memory.

    Args:
        steps: seconds of each step so far.
        n_left: number of remaining steps.
    """
    if not steps or not n_left:
        return None
    return TimeLeft(fmean(steps[1:][-RECENT:] or steps) * n_left, by_first_step=len(steps) == 1)


class Pace:
    """The steps of a run: how many are done, and how long each took in this start of the run."""

    def __init__(self, timers: PhaseTimers) -> None:
        self._timers = timers
        self.n_steps = 0
        """Steps of the whole run."""
        self.done = 0
        self.began: float | None = None
        """Time at which the steps of this start began; None before."""
        self._step_began = 0.0
        self._steps: list[float] = []

    def begin(self, n_steps: int, done: int) -> None:
        """Begin the steps. An earlier start of the run has made the first `done`."""
        self.n_steps, self.done = n_steps, done
        self.began = self._step_began = time.perf_counter()

    def finish_step(self, step: int) -> None:
        """End a step. The evaluation before training is not part of the first one."""
        if not self._steps:
            self._step_began = max(self._step_began, self._timers.ended.get(EVALUATION, 0.0))
        now = time.perf_counter()
        self._steps.append(now - self._step_began)
        self.done, self._step_began = step, now

    @property
    def time_left(self) -> TimeLeft | None:
        """The time that the rest of the run takes; None before the end of the first step."""
        left = time_left(self._steps, self.n_steps - self.done)
        if left is None:
            return None
        return replace(left, seconds=max(left.seconds - (time.perf_counter() - self._step_began), 0.0))
