"""The screen of a run: a banner, one line per step, a live status line, and the paths of the results at the end.

+- arithmetic / trial-0 -------------+
| model    package:tiny-moe          |
+------------------------------------+
 step reward    acc ... | seconds rollout  train
 1/50  0.312  0.312 ... |    12.1     8.0    3.6
 2/50  0.344  0.344 ... |    11.8     7.9    3.5
* step 3/50   rollout 40%   4.1 s, about 0:06 left   elapsed 0:28   about 9:24 left      <- on a terminal only
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from unicodedata import category

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fivefold.observe.columns import Column
from fivefold.observe.output import standard_output
from fivefold.observe.progress import Progress
from fivefold.observe.status_line import StatusLine, live
from fivefold.observe.table import StepTable, number
from fivefold.observe.timers import PhaseTimers

HEADER_EVERY = 25
"""Steps after which the labels are printed again."""
SAMPLE_INDENT = "    "
CUT = " ... "
SILENCE_S = 60.0
"""Seconds without a line after which the status is printed as a line, if there is no status line."""
BEST_OF = {"eval/accuracy": "held-out accuracy", "accuracy": "training accuracy", "reward/mean": "training reward"}
"""Metrics that choose the best step, larger is better: the first that several steps have; and what a person reads."""


class RunConsole:
    """The screen of one run.

        timers = PhaseTimers()
        with RunConsole(TRAIN_COLUMNS, timers) as screen:
            screen.banner("arithmetic / trial-0", {"model": ..., "actor": ...})
            screen.start(n_steps=50)
            ...
            screen.step(1, metrics, timers.take())
            screen.note("evaluation after step 20: accuracy 0.71")
            screen.end("finished in 1:23", {"weights": ...})

    On a terminal, a status line follows the phases of the timers. Elsewhere (a pipe, a file) there are only plain
    lines, and the status as a line after a minute without any. Several threads may write. The run continues without a
    screen if the reader of its output ends.
    """

    def __init__(self, columns: Sequence[Column], timers: PhaseTimers, console: Console | None = None) -> None:
        self.console = standard_output() if console is None else console
        self._columns = columns
        self._table: StepTable | None = None
        self._status = StatusLine(timers)
        self._live: Live | None = None
        self._n_lines = 0
        self._printed = time.monotonic()
        """When the last line was printed."""
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._best: dict[str, tuple[float, int]] = {}
        """Value and number of the best step so far, by metric."""
        self._n_measured: Counter[str] = Counter()
        """Number of steps that have each metric."""

    def banner(self, title: str, facts: Mapping[str, object]) -> None:
        """Print the run's name and facts about it."""
        self._box(title, facts, style="cyan")

    def start(self, n_steps: int, done: int = 0, earlier: Iterable[Mapping[str, Any]] = ()) -> None:
        """Begin the table of steps.

        Args:
            n_steps: steps of the whole run.
            done: steps that earlier starts of the run have made.
            earlier: metrics of those steps, with their numbers as `step`; one of them may be the best.
        """
        for record in earlier:
            self._remember_best(record["step"], record)
        self._table = StepTable(self._columns, n_steps, self.console.width)
        self._status.pace.begin(n_steps, done)

    def follow(self, workers: Callable[[], Mapping[str, Progress]], builds: Mapping[str, float]) -> None:
        """Show the progress of workers on the status line; see `StatusLine.follow`."""
        self._status.follow(workers, builds)

    def step(self, step: int, metrics: Mapping[str, float | None], seconds: Mapping[str, float]) -> None:
        """Print one line: the numbers of `step` (counted from 1) and the seconds of its phases.

        Raises:
            RuntimeError: called before `start`.
        """
        if self._table is None:
            raise RuntimeError("RunConsole.step was called before RunConsole.start: call start first")
        with self._lock:
            if self._n_lines % HEADER_EVERY == 0 or self._table.needs_header(metrics):
                for line in self._table.header(metrics, seconds):
                    self._line(Text(line, style="bold"))
            self._n_lines += 1
            self._line(_painted(self._table.row(step, metrics, seconds)))
        self._status.pace.finish_step(step)
        self._remember_best(step, metrics)

    def samples(self, step: int, samples: Sequence[tuple[float, str, str]]) -> None:
        """Print samples of `step`, each (reward, prompt, response), on three lines of the screen."""
        room = self.console.width - len(SAMPLE_INDENT) - len("response  ")
        for reward, prompt, response in samples:
            with self._lock:
                self._line(Text(f"{SAMPLE_INDENT}step {step}, reward {number(reward, 'fixed')}", style="dim"))
                self._line(Text.assemble(f"{SAMPLE_INDENT}prompt    ", (shortened(prompt, room), "dim")))
                self._line(Text(f"{SAMPLE_INDENT}response  {shortened(response, room)}"))

    def note(self, text: str, style: str = "") -> None:
        """Print a text between the steps, in full even on a narrow screen."""
        self._printed = time.monotonic()
        self.console.print(Text(text, style=style), soft_wrap=True)

    def end(self, title: str, facts: Mapping[str, object]) -> None:
        """Stop the status line, and print how the run ended and where its results are."""
        self._stop()
        best: dict[str, object] = {}
        if (name := self._best_metric) is not None:
            value, step = self._best[name]
            best = {"best step": f"{step}, {BEST_OF[name]} {value:.3f}"}
        self._box(title, {**best, **facts}, style="green")

    def _remember_best(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Remember the step with the largest value of each metric of `BEST_OF`."""
        for name in BEST_OF:
            value = metrics.get(name)
            if value is not None and math.isfinite(value):
                self._n_measured[name] += 1
                if name not in self._best or value > self._best[name][0]:
                    self._best[name] = value, step
        if (shown := self._best_metric) is not None:
            value, best = self._best[shown]
            self._status.best = f"best {BEST_OF[shown]} {value:.3f} at step {best}"

    @property
    def _best_metric(self) -> str | None:
        """The first metric of `BEST_OF` that several steps have; None if there is none.

        An accuracy that has always been 0 gives way to the next metric.
        """
        several = [name for name in BEST_OF if self._n_measured[name] > 1]
        return next((name for name in several if self._best[name][0] != 0), several[0] if several else None)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = live(self._status, self.console)
            # Drawn here before Live's thread draws it; otherwise the banner could be printed on the same line after it.
            self._live.start(refresh=True)
        else:
            self._watch_silence()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _watch_silence(self) -> None:
        """Print the status, from a thread, whenever nothing has been printed for long."""

        def watch() -> None:
            while not self._ended.wait(max(self._printed + SILENCE_S - time.monotonic(), 1.0)):
                if time.monotonic() - self._printed >= SILENCE_S:
                    self._print_status(self._status)

        threading.Thread(target=watch, name="silence", daemon=True).start()

    def _print_status(self, status: StatusLine) -> None:
        """Print the status as a plain line."""
        self.note(status.text(self.console.width))

    def _stop(self) -> None:
        self._ended.set()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, text: Text) -> None:
        self._printed = time.monotonic()
        # Lines are cut instead of wrapped, because a wrapped table cannot be read.
        self.console.print(text, no_wrap=True, overflow="ellipsis", crop=True)

    def _box(self, title: str, facts: Mapping[str, object], style: str) -> None:
        if not self.console.is_terminal:
            width = max((len(name) for name in facts), default=0)
            lines = [f"  {name.ljust(width)}  {value}" for name, value in facts.items()]
            lines = [line.replace("\n", f"\n{' ' * (width + 4)}") for line in lines]
            self.console.print(Text("\n".join([title, *lines])), soft_wrap=True)
            return
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in facts.items():
            grid.add_row(name, Text(str(value)))
        self.console.print(
            Panel(grid, title=Text(title, style="bold"), title_align="left", border_style=style, expand=False)
        )


def shortened(text: str, width: int) -> str:
    """Put a text on one line of at most `width` characters, cutting out its middle if it is too long.

    Control characters, which could move the cursor or clear the screen, and lone surrogates are escaped.
    """
    line = "".join(_visible(letter) for letter in " ".join(text.split()))
    if len(line) <= width:
        return line
    tail = (width - len(CUT)) // 2
    return line[: width - len(CUT) - tail] + CUT + line[len(line) - tail :]


def _visible(letter: str) -> str:
    return letter.encode("unicode_escape").decode() if category(letter) in ("Cc", "Cs") else letter


def _painted(row: str) -> Text:
    """Dim the seconds so that the metrics stand out."""
    numbers, bar, seconds = row.partition("|")
    return Text.assemble(numbers, (bar + seconds, "dim"))
