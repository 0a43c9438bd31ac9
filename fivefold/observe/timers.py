"""How long each phase of a step took, and which phase the driver is in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SETUP = "setup"


class PhaseTimers:
    """Seconds per phase of one step, on the driver's clock.

        timers = PhaseTimers()
        with timers.phase("rollout"):
            completions = rollout.call("generate", requests)
        timers.take()                       # {"rollout": 3.21}, and the next step starts at nothing

    `current` names the phase in worker errors and on the console. Phases may nest; the time of an inner one is its own
    and not the outer's, so that the seconds of all phases add up to what a clock on the wall would say.
    """

    def __init__(self, on_change: Callable[[str], None] | None = None) -> None:
        self._seconds: dict[str, float] = {}
        self._stack: list[str] = [SETUP]
        self._inner = 0.0
        """Seconds spent in phases inside the current one."""
        self._on_change = on_change

    @property
    def current(self) -> str:
        """Innermost open phase; `setup` outside of any."""
        return self._stack[-1]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Everything inside belongs to phase `name`; a phase entered twice in a step adds up."""
        self._stack.append(name)
        self._tell()
        start, inner_before = time.perf_counter(), self._inner
        self._inner = 0.0
        yield
        # Not reached by a failure: whoever reports it asks which phase it was in.
        elapsed = time.perf_counter() - start
        self._seconds[name] = self._seconds.get(name, 0.0) + elapsed - self._inner
        self._inner = inner_before + elapsed
        self._stack.pop()
        self._tell()

    def take(self) -> dict[str, float]:
        """Seconds of each phase finished since the last `take`, in the order in which they ended."""
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _tell(self) -> None:
        if self._on_change is not None:
            self._on_change(self.current)
