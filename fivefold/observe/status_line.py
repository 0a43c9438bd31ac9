"""The live line below a run's table: what goes on, how long it takes, and what is left.

* step 3/50   evaluation 53%   4.1 s, about 4 s left   elapsed 0:28   about 9:24 left   best accuracy 0.800 at step 2
* setup, actor loading weights 12%   8.0 s, about 59 s left
* setup, rollout starting the server   41.0 s, about 54 s left
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import MappingProxyType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from fivefold.observe.progress import Progress, current_progress
from fivefold.observe.time_left import TimeLeft, time_left
from fivefold.observe.timers import SETUP

LONG_PHASE_SECONDS = 2.0
"""Least time that a phase took before, from which the line says what is left of it."""
SPINNER_WIDTH = 2
REFRESH_HZ = 8
GAP = "   "
EVALUATION = "evaluation"
"""The phase of an evaluation."""


class StatusLine:
    """What a run does at the moment, as one line; times are those of this process's clock."""

    def __init__(self) -> None:
        self.best = ""
        """What is said of the best step so far."""
        self._phase = SETUP
        self._phase_began = time.monotonic()
        self._began: float | None = None
        self.n_steps = 0
        """Steps of the whole run."""
        self._done = 0
        self._step_began = 0.0
        self._steps: list[float] = []
        """Seconds of each step of this start."""
        self._took: dict[str, float] = {}
        """Seconds that each phase took the last time."""
        self._workers: Callable[[], Mapping[str, Progress]] = dict
        self._builds: Mapping[str, float] = {}
        self._spinner = Spinner("dots", style="cyan")

    def follow(
        self, workers: Callable[[], Mapping[str, Progress]], builds: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Show the progress of workers.

        Args:
            workers: returns the progress of roles, by their names.
            builds: seconds that the processes of each role took at an earlier start until they were ready.
        """
        self._workers, self._builds = workers, builds

    def begin(self, n_steps: int, done: int) -> None:
        """Begin the steps, the first `done` of which an earlier start has made."""
        self.n_steps = n_steps
        self._done = done
        self._began = self._step_began = time.monotonic()

    def enter(self, phase: str) -> None:
        """Begin a phase, which ends the one before."""
        now = time.monotonic()
        if self._phase != SETUP:  # which is all that goes on outside of phases
            self._took[self._phase] = now - self._phase_began
        if self._phase == EVALUATION and not self._steps:  # the one before training is no part of the first step
            self._step_began = now
        self._phase, self._phase_began = phase, now

    def finish_step(self, step: int) -> None:
        """End a step."""
        now = time.monotonic()
        self._steps.append(now - self._step_began)
        self._done, self._step_began = step, now

    @property
    def time_left(self) -> TimeLeft | None:
        """The time that the rest of the run takes; None before the end of the first step."""
        left = time_left(self._steps, self.n_steps - self._done)
        if left is None:
            return None
        return replace(left, seconds=max(left.seconds - (time.monotonic() - self._step_began), 0.0))

    def text(self, width: int) -> str:
        """Return the line, without what does not fit into `width` characters."""
        words = []
        if self.n_steps and self._done < self.n_steps:
            words.append(f"step {self._done + 1}/{self.n_steps}")
        words += self._phase_words()
        if self._began is not None:
            words.append(f"elapsed {clock(time.monotonic() - self._began)}")
            if (left := self.time_left) is not None:
                words.append(f"about {clock(left.seconds)} left{left.doubt}")
        words += [self.best] if self.best else []
        while len(words) > 1 and len(GAP.join(words)) > width:
            words.pop()
        return GAP.join(words)

    def _phase_words(self) -> list[str]:
        """Return what goes on, and how long it has taken and will take; nothing between the phases of a step."""
        if self._phase == SETUP and self._began is not None:
            return []
        seconds = time.monotonic() - self._phase_began
        role, progress = self._slowest()
        if progress is None:
            before = self._took.get(self._phase, 0.0)
            return [self._phase, _taken(seconds, before - seconds if before >= LONG_PHASE_SECONDS else None)]
        left = progress.seconds_left
        if left is None and self._phase == SETUP and role in self._builds:
            left = self._builds[role] - progress.seconds
        share = "" if progress.share is None else f" {progress.share:.0%}"
        name = f"{self._phase}, {role} {progress.action}" if role else self._phase
        return [f"{name}{share}", _taken(seconds, left)]

    def _slowest(self) -> tuple[str, Progress | None]:
        """Return the role that needs the longest, and its progress; the role is empty if that is this process."""
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
    """Return what draws the line on a terminal, for as long as it is entered."""
    return Live(status, console=console, refresh_per_second=REFRESH_HZ, transient=True)


@contextmanager
def live_status() -> Iterator[StatusLine]:
    """Give a status line that is shown on the standard error stream during the block, if that is a terminal."""
    status, console = StatusLine(), Console(stderr=True)
    with live(status, console) if console.is_terminal else nullcontext():
        yield status


def _taken(seconds: float, left: float | None) -> str:
    """Return how long something has taken, and about how long it still takes if that is known."""
    return f"{seconds:.1f} s" + (f", about {clock(left)} left" if left is not None and left > 0 else "")


def clock(seconds: float) -> str:
    """Format seconds: 65 -> 1:05, 3665 -> 1:01:05."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
