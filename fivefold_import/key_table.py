"""A table whose cells break at blanks and at the dots of keys, and within a word only if nothing else fits.

actor_rollout_ref.actor.optim.lr=1e-06   ->   actor_rollout_ref.
                                              actor.optim.
                                              lr=1e-06
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

PIECES = re.compile(r"\s+|(?:[^\s.=/,]|\.(?=\d))*(?:[=/,]|\.(?!\d))+|(?:[^\s.=/,]|\.(?=\d))+")
"""The parts of a text that a line can end after: a word up to a dot or a like sign, or the blanks between words."""
SYLLABLES = re.compile(r"[^_:|-]*[_:|-]+|[^_:|-]+")
"""The parts of a word that is too wide for a line."""
BORDERS = 10
"""Characters of a line that the borders of three columns and the blanks around them take."""
LEAST_PROSE = 14
"""Characters that the column of prose has even on the narrowest terminal."""


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    cells: tuple[str, str, str]
    style: str


@dataclass(frozen=True)
class KeyTable:
    """A table of keys and of what is said about them."""

    title: str
    header: tuple[str, str, str]
    """Titles of the columns: two of keys, and one of prose."""
    groups: tuple[tuple[Row, ...], ...]
    """The rows, with a line between one group and the next."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [row.cells for group in self.groups for row in group]
        widths = _column_widths([list(column) for column in zip(self.header, *rows, strict=True)], options.max_width)
        table = Table(title=Text(self.title), title_justify="left", expand=False)
        for title, width in zip(self.header, widths, strict=True):
            table.add_column(title, width=width)
        for group in self.groups:
            for row in group:
                cells = ("\n".join(wrap(text, width)) for text, width in zip(row.cells, widths, strict=True))
                table.add_row(*map(Text, cells), style=row.style)
            table.add_section()
        yield table


def _column_widths(columns: Sequence[Sequence[str]], available: int) -> list[int]:
    """Return the widths of two columns of keys and one of prose; the keys' are wide enough for each of their parts."""
    room = max(available - BORDERS, 3 * LEAST_PROSE)
    longest = [max(map(len, column)) for column in columns]
    if sum(longest) <= room:
        return longest
    most = (room - LEAST_PROSE) // 2
    keys = [
        min(whole, most, max(room // 3, *map(widest, column)))
        for whole, column in zip(longest[:2], columns, strict=False)
    ]
    return [*keys, room - sum(keys)]


def widest(text: str) -> int:
    """Return the characters of the longest part of `text` that a line should not end in."""
    return max(map(len, PIECES.findall(text)), default=1)


def wrap(text: str, width: int) -> list[str]:
    """Return the lines of `text`, each of at most `width` characters."""
    return [line for part in text.splitlines() or [""] for line in _wrapped(part, max(width, 1))]


def _wrapped(text: str, width: int) -> list[str]:
    lines, line = [], ""
    for piece in PIECES.findall(text):
        for part in [piece] if len(piece.rstrip()) <= width else SYLLABLES.findall(piece):
            if len(line) + len(part.rstrip()) > width and line.strip():
                lines.append(line.rstrip())
                line = ""
            line += part if line else part.lstrip()
            while len(line.rstrip()) > width:
                lines.append(line[:width])
                line = line[width:]
    return [*lines, line.rstrip()]
