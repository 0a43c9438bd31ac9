"""Standard output of a run: its width, and a reader that may end before the run."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from rich.console import Console

FILE_WIDTH = 160
"""Characters of a line if neither the output nor the process has a terminal."""
LEAST_WIDTH = 60
"""Least characters of a line."""


class _Output(Console):
    """Standard output whose reader may end before the run, as `tee` does on Ctrl-C."""

    def on_broken_pipe(self) -> None:
        """Print nothing more. Rich itself would end the process in the middle of a step."""
        self.quiet = True
        discard(sys.stdout)


def discard(stream: TextIO) -> None:
    """Discard everything that is written to a stream from now on, because nobody reads it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def standard_output() -> Console:
    """Return the console of standard output."""
    console = _Output(highlight=False)
    return console if console.is_terminal else _Output(highlight=False, width=_width_elsewhere())


def _width_elsewhere() -> int:
    """Return the line width for output that is not a terminal: $COLUMNS, or the width of the process's terminal.

    The output of `fivefold train ... | tee log` is read in the terminal in which the command was typed.
    """
    if os.environ.get("COLUMNS", "").isdecimal():
        return max(int(os.environ["COLUMNS"]), LEAST_WIDTH)
    for stream in (sys.stderr, sys.stdin):
        if stream is not None and stream.isatty():
            return max(os.get_terminal_size(stream.fileno()).columns, LEAST_WIDTH)
    return FILE_WIDTH
