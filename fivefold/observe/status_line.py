"""The live line below a run's table: what the run is doing, for how long, and how much is left.

* step 3/50   evaluation 53%   4.1 s, about 4 s left   elapsed 0:28   about 9:24 left   best training accuracy 0.8
* setup, actor loading weights 12%   8.0 s, about 59 s left
* setup, rollout starting the server   41.0 s, about 54 s left
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from fivefold.observe.progress import Progress, current_progress
from fivefold.observe.timers import SETUP, Pace, PhaseTimers

LONG_PHASE_SECONDS = 2.0
"""Least seconds that a phase took last time for the line to estimate what is left of it."""
SPINNER_WIDTH = 2
REFRESH_HZ = 8
GAP = "   "


class StatusLine:
    """What a run is doing, in one line, read from its timers whenever the line is drawn."""

    def __init__(self, timers: PhaseTimers) -> None:
        self.timers = timers
        self.pace = Pace(timers)
        self.best = ""
        """A text about the best step so far."""
        self._workers: Callable[[], Mapping[str, Progress]] = dict
        self._builds: Mapping[str, float] = {}
        self._spinner = Spinner("dots", style="cyan")

    def follow(
        self, workers: Callable[[], Mapping[str, Progress]], builds: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Show the progress of workers.

        Args:
            workers: returns the progress of each role by name.
            builds: seconds that each role's processes needed to get ready in an earlier start.
        """
        self._workers, self._builds = workers, builds

    def text(self, width: int) -> str:
        """Return the line, without the parts that do not fit into `width` characters."""
        pace, words = self.pace, list[str]()
        if pace.n_steps and pace.done < pace.n_steps:
            words.append(f"step {pace.done + 1}/{pace.n_steps}")
        words += self._phase_words()
        if pace.began is not None:
            words.append(f"elapsed {clock(time.perf_counter() - pace.began)}")
            if (left := pace.time_left) is not None:
                words.append(f"about {clock(left.seconds)} left{left.doubt}")
        words += [self.best] if self.best else []
        while len(words) > 1 and len(GAP.join(words)) > width:
            words.pop()
        return GAP.join(words)

    def _phase_words(self) -> list[str]:
        """Return the phases in progress with the time they have taken and will take; nothing between phases."""
        phase, is_setup = self.timers.under_way, self.timers.under_way == SETUP
        if is_setup and self.pace.began is not None:
            return []
        seconds = time.perf_counter() - self.timers.since
        role, progress = self._slowest()
        if progress is None:
            before = 0.0 if is_setup else self.timers.took.get(phase, 0.0)
            return [phase, _taken(seconds, before - seconds if before >= LONG_PHASE_SECONDS else None)]
        left = progress.seconds_left
        if left is None and is_setup and role in self._builds:
            left = self._builds[role] - progress.seconds
        share = "" if progress.share is None else f" {progress.share:.0%}"
        name = f"{phase}, {role} {progress.action}" if role else phase
        return [f"{name}{share}", _taken(seconds, left)]

    def _slowest(self) -> tuple[str, Progress | None]:
        """Return the role that needs the longest, and its progress. The role is empty if it is this process."""
        if (own := current_progress()) is not None:
            return "", own
        reports = self._workers()
        if not reports:
            return "", None
        unknown = float("inf")
        left = {role: unknown if (rest := each.seconds_left) is None else rest for role, each in reports.items()}
        role = max(left, key=lambda role: left[role])
        return role, reports[role]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = self.text(options.max_width - SPINNER_WIDTH)
        self._spinner.update(text=Text(line, no_wrap=True, overflow="ellipsis"))
        yield self._spinner


def live(status: StatusLine, console: Console) -> Live:
    """Return a context manager that draws the line on a terminal."""
    return Live(status, console=console, refresh_per_second=REFRESH_HZ, transient=True)


@contextmanager
def live_status() -> Iterator[StatusLine]:
    """Show a status line on standard error during the block, if that is a terminal."""
    status, console = StatusLine(PhaseTimers()), Console(stderr=True)
    with live(status, console) if console.is_terminal else nullcontext():
        yield status


def _taken(seconds: float, left: float | None) -> str:
    """Return how long something has taken, and about how long it will still take if that is known."""
    return f"{seconds:.1f} s" + (f", about {clock(left)} left" if left is not None and left > 0 else "")


def clock(seconds: float) -> str:
    """Format seconds: 65 -> 1:05, 3665 -> 1:01:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
