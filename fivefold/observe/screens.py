"""The kinds of screens of a command: the table, almost nothing, or JSON for programs.

table    RunConsole
quiet    notes, such as evaluations and warnings, and how the run ended
json     {"event": "start", "title": "arithmetic / trial-0", "facts": {...}}
         {"event": "step", "step": 1, "of": 48, "seconds_left": 81.2, "metrics": {...}, "seconds": {...}}
         {"event": "progress", "text": "step 2/48   rollout   64.0 s ..."}          after a minute without another event
         {"event": "note", "text": "held-out accuracy after step 24: ..."}
         {"event": "end", "title": "finished in 92 s", "facts": {...}}
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from types import TracebackType
from typing import Any, Literal, Self

from fivefold.observe.columns import Column
from fivefold.observe.console import RunConsole
from fivefold.observe.jsonl import finite
from fivefold.observe.output import discard
from fivefold.observe.status_line import StatusLine
from fivefold.observe.timers import PhaseTimers

LONGEST_TEXT = 1000
"""Most characters of a text for programs."""
ScreenKind = Literal["table", "quiet", "json"]


def open_screen(kind: ScreenKind, columns: Sequence[Column], timers: PhaseTimers) -> RunConsole:
    """Return the screen of a run.

    Args:
        kind: which screen.
        columns: columns of the table.
        timers: the phases that a status line shows.
    """
    kinds = {"table": RunConsole, "quiet": QuietScreen, "json": JsonScreen}
    return kinds[kind](columns, timers)


class QuietScreen(RunConsole):
    """A screen without table, samples and phases."""

    def banner(self, title: str, facts: Mapping[str, object]) -> None:
        """Print the warnings among the facts, if there are any."""
        if "warnings" in facts:
            self.note(f"warnings: {facts['warnings']}")

    def step(self, step: int, metrics: Mapping[str, float | None], seconds: Mapping[str, float]) -> None:
        """Print nothing."""

    def samples(self, step: int, samples: Sequence[tuple[float, str, str]]) -> None:
        """Print nothing."""

    def end(self, title: str, facts: Mapping[str, object]) -> None:
        """Print how the run ended."""
        self.note(title)

    def __enter__(self) -> Self:
        return self


class JsonScreen(RunConsole):
    """Prints one JSON object per line. Everything else that is printed meanwhile goes to standard error."""

    def __init__(self, columns: Sequence[Column], timers: PhaseTimers) -> None:
        super().__init__(columns, timers)
        self._out = sys.stdout
        self._elsewhere = redirect_stdout(sys.stderr)
        self._printing = threading.Lock()

    def banner(self, title: str, facts: Mapping[str, object]) -> None:
        """Print the event `start`."""
        self._print(event="start", title=title, facts=_texts(facts))

    def step(self, step: int, metrics: Mapping[str, float | None], seconds: Mapping[str, float]) -> None:
        """Print the event `step`."""
        pace = self._status.pace
        pace.finish_step(step)
        left = pace.time_left
        self._print(
            event="step",
            step=step,
            of=pace.n_steps,
            seconds_left=None if left is None else round(left.seconds, 1),
            metrics=dict(metrics),
            seconds=dict(seconds),
        )

    def samples(self, step: int, samples: Sequence[tuple[float, str, str]]) -> None:
        """Print the event `samples`."""
        shown = [{"reward": reward, "prompt": prompt, "response": response} for reward, prompt, response in samples]
        self._print(event="samples", step=step, samples=shown)

    def note(self, text: str, style: str = "") -> None:
        """Print the event `note`."""
        self._print(event="note", text=text)

    def end(self, title: str, facts: Mapping[str, object]) -> None:
        """Print the event `end`."""
        self._print(event="end", title=title, facts=_texts(facts))

    def __enter__(self) -> Self:
        self._elsewhere.__enter__()
        self._watch_silence()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._elsewhere.__exit__(kind, error, trace)

    def _print_status(self, status: StatusLine) -> None:
        """Print the event `progress`."""
        self._print(event="progress", text=status.text(LONGEST_TEXT))

    def _print(self, **event: Any) -> None:
        self._printed = time.monotonic()
        with self._printing:
            try:
                self._out.write(json.dumps(finite(event)) + "\n")
                self._out.flush()
            except BrokenPipeError:
                discard(self._out)


def _texts(facts: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in facts.items()}
