"""The screen of a run: a banner, one line for each step, a live status line, and the results' paths at the end.

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
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TextIO
from unicodedata import category

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fivefold.observe.progress import Progress
from fivefold.observe.status_line import StatusLine, live
from fivefold.observe.table import Column, StepTable, number

FILE_WIDTH = 160
"""Characters of a line if neither the output nor the process has a terminal."""
LEAST_WIDTH = 60
"""Least characters of a line."""
HEADER_EVERY = 25
"""Steps after which the labels are printed again."""
SAMPLE_INDENT = "    "
CUT = " ... "
SILENCE_S = 60.0
"""Seconds without a line after which what goes on is printed where there is no status line."""
BEST_OF = ("eval/accuracy", "accuracy", "reward/mean")
"""Metrics by which the best step is chosen: the first that several steps have, where larger is better."""


class RunConsole:
    """The screen of one run.

        with RunConsole(TRAIN_COLUMNS) as screen:
            timers = PhaseTimers(on_change=screen.phase)
            screen.banner("arithmetic / trial-0", {"model": ..., "actor": ...})
            screen.start(n_steps=50)
            ...
            screen.step(1, metrics, timers.take())
            screen.note("evaluation after step 20: accuracy 0.71")
            screen.end("finished in 1:23", {"weights": ...})

    On a terminal a status line follows the phases; elsewhere (a pipe, a file) there are plain lines only, and after a
    minute without one the text of that line. Several threads may write to it. The run goes on without
    a screen if the reader of its output ends.
    """

    def __init__(self, columns: Sequence[Column], console: Console | None = None) -> None:
        self.console = _default_console() if console is None else console
        self._columns = columns
        self._table: StepTable | None = None
        self._status = StatusLine()
        self._live: Live | None = None
        self._n_lines = 0
        self._printed = time.monotonic()
        """When the last line was printed."""
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._best: dict[str, tuple[float, int]] = {}
        """Value and number of the best step so far, by metric."""
        self._n_measured: Counter[str] = Counter()
        """Steps that have each metric."""

    def banner(self, title: str, facts: Mapping[str, object]) -> None:
        """Print the run's name and facts about it."""
        self._box(title, facts, style="cyan")

    def start(self, n_steps: int, done: int = 0, earlier: Iterable[Mapping[str, Any]] = ()) -> None:
        """Begin the table of steps.

        Args:
            n_steps: steps of the whole run.
            done: steps that earlier starts of the run have made.
            earlier: the metrics of those steps, with their numbers as `step`: the best of all may be among them.
        """
        for record in earlier:
            self._remember_best(record["step"], record)
        self._table = StepTable(self._columns, n_steps, self.console.width)
        self._status.begin(n_steps, done)

    def follow(self, workers: Callable[[], Mapping[str, Progress]], builds: Mapping[str, float]) -> None:
        """Show the progress of workers on the status line; see `StatusLine.follow`."""
        self._status.follow(workers, builds)

    def phase(self, name: str) -> None:
        """Show `name`, the phases in progress, on the status line; to be the `on_change` of `PhaseTimers`."""
        self._status.enter(name)

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
        self._status.finish_step(step)
        self._remember_best(step, metrics)

    def samples(self, step: int, samples: Sequence[tuple[float, str, str]]) -> None:
        """Print samples of `step`, (reward, prompt, response) each, on three lines of the screen."""
        room = self.console.width - len(SAMPLE_INDENT) - len("response  ")
        for reward, prompt, response in samples:
            with self._lock:
                self._line(Text(f"{SAMPLE_INDENT}step {step}, reward {number(reward, 'fixed')}", style="dim"))
                self._line(Text.assemble(f"{SAMPLE_INDENT}prompt    ", (shortened(prompt, room), "dim")))
                self._line(Text(f"{SAMPLE_INDENT}response  {shortened(response, room)}"))

    def note(self, text: str, style: str = "") -> None:
        """Print a text between the steps, whole however narrow the screen is."""
        self._printed = time.monotonic()
        self.console.print(Text(text, style=style), soft_wrap=True)

    def end(self, title: str, facts: Mapping[str, object]) -> None:
        """Stop the status line; print how the run ended and where its results are."""
        self._stop()
        best: dict[str, object] = {}
        if (name := self._told_best) is not None:
            value, step = self._best[name]
            best = {"best step": f"{step}, {name} {value:.3f}"}
        self._box(title, {**best, **facts}, style="green")

    def _remember_best(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Remember the step with the largest value of each metric of `BEST_OF`."""
        for name in BEST_OF:
            value = metrics.get(name)
            if value is not None and math.isfinite(value):
                self._n_measured[name] += 1
                if name not in self._best or value > self._best[name][0]:
                    self._best[name] = value, step
        if (told := self._told_best) is not None:
            value, best = self._best[told]
            self._status.best = f"best {told} {value:.3f} at step {best}"

    @property
    def _told_best(self) -> str | None:
        """The first metric of `BEST_OF` that several steps have, for of one there is no best; None: there is none.

        An accuracy that has always been 0 gives way to the next one.
        """
        several = [name for name in BEST_OF if self._n_measured[name] > 1]
        return next((name for name in several if self._best[name][0] != 0), several[0] if several else None)

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = live(self._status, self.console)
            # Drawn before its thread draws it, or the banner could be printed behind it on the same line.
            self._live.start(refresh=True)
        else:
            self._watch_silence()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _watch_silence(self) -> None:
        """Tell what goes on, from a thread, whenever nothing has been printed for long."""

        def watch() -> None:
            while not self._ended.wait(max(self._printed + SILENCE_S - time.monotonic(), 1.0)):
                if time.monotonic() - self._printed >= SILENCE_S:
                    self._tell_status(self._status)

        threading.Thread(target=watch, name="silence", daemon=True).start()

    def _tell_status(self, status: StatusLine) -> None:
        """Print what goes on as a plain line."""
        self.note(status.text(self.console.width))

    def _stop(self) -> None:
        self._ended.set()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, text: Text) -> None:
        self._printed = time.monotonic()
        # Lines are cut and not folded, because a folded table cannot be read.
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
    """Put a text on one line of at most `width` characters, without its middle if it is too long.

    Characters that would move the cursor or clear the screen, and those that have no encoding, are written as codes.
    """
    line = "".join(_visible(letter) for letter in " ".join(text.split()))
    if len(line) <= width:
        return line
    tail = (width - len(CUT)) // 2
    return line[: width - len(CUT) - tail] + CUT + line[len(line) - tail :]


def _visible(letter: str) -> str:
    return letter.encode("unicode_escape").decode() if category(letter) in ("Cc", "Cs") else letter


def _painted(row: str) -> Text:
    """Dim the seconds, so that the metrics stand out."""
    numbers, bar, seconds = row.partition("|")
    return Text.assemble(numbers, (bar + seconds, "dim"))


class _Output(Console):
    """Standard output, whose reader may end before the run, as `tee` does at Ctrl-C."""

    def on_broken_pipe(self) -> None:
        """Print nothing from here on. Rich itself would end the process, in the middle of a step."""
        self.quiet = True
        discard(sys.stdout)


def discard(stream: TextIO) -> None:
    """Let all that is written to a stream go nowhere, because nobody reads it any more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _default_console() -> Console:
    console = _Output(highlight=False)
    return console if console.is_terminal else _Output(highlight=False, width=_width_elsewhere())


def _width_elsewhere() -> int:
    """Return the width of lines that do not go to a terminal: $COLUMNS, or that of the process's terminal, if any.

    The output of `fivefold train ... | tee log` is read in the terminal into which the command was typed.
    """
    if os.environ.get("COLUMNS", "").isdecimal():
        return max(int(os.environ["COLUMNS"]), LEAST_WIDTH)
    for stream in (sys.stderr, sys.stdin):
        if stream is not None and stream.isatty():
            return max(os.get_terminal_size(stream.fileno()).columns, LEAST_WIDTH)
    return FILE_WIDTH
