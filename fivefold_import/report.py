"""The report of an import: what became of each key, for people (a table, comments) and for programs (JSON)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any

from fivefold.config.problems import COMMANDS
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold_import.draft import Entry, Outcome
from fivefold_import.key_table import KeyTable, Row

OUTCOMES: tuple[Outcome, ...] = ("unsupported", "mapped", "implied")
COLOURS = {"unsupported": "red", "mapped": "green", "implied": "dim"}
SECRET = re.compile(r"(api_?key|secret|password|(^|[._])token|(hub|hf|auth|access)_token)$", re.IGNORECASE)
"""Keys whose values are not shown."""
LONGEST_VALUE = 60
"""Characters of a value that the table and the comments show."""


@dataclass(frozen=True)
class Report:
    """What became of each key in one import."""

    framework: str
    sources: tuple[str, ...]
    """The files that were read, and `overrides` if there were any."""
    entries: tuple[Entry, ...]
    """One entry for each key of the sources, and one for each default of the framework that was converted."""
    to_give: tuple[str, ...]
    """Keys that the recipe needs and the sources do not give; the recipe has `???` for them."""
    notes: tuple[str, ...]
    """Notes that belong to no single key."""
    problems: tuple[str, ...]
    """Parts of the sources that were not read, and what `fivefold plan` or the recipe's command would refuse."""
    schema: type[Recipe] = TrainRecipe
    """The kind of the recipe."""

    @property
    def command(self) -> str:
        """The command that the recipe is for."""
        return COMMANDS[self.schema]

    def of(self, outcome: Outcome) -> list[Entry]:
        """Return the entries of the source's own keys with an outcome."""
        return [entry for entry in self.entries if entry.outcome == outcome and not entry.is_default]

    @property
    def defaults(self) -> list[Entry]:
        """The entries of the framework's defaults that differ from Fivefold's."""
        return [entry for entry in self.entries if entry.is_default and entry.outcome != "implied"]

    @property
    def unsupported(self) -> list[Entry]:
        """The entries, of the source's keys and of the framework's defaults, that the recipe does not do."""
        return [entry for entry in self.entries if entry.outcome == "unsupported"]

    def summary(self) -> str:
        """Return one line of counts."""
        counts = ", ".join(f"{len(self.of(outcome))} {outcome}" for outcome in ("mapped", "implied", "unsupported"))
        total = sum(not entry.is_default for entry in self.entries)
        keys = "1 key" if total == 1 else f"{total} keys"
        problems = f" Problems: {len(self.problems)}." if self.problems else ""
        defaults = f"Defaults of {self.framework} that differ: {len(self.defaults)}."
        return f"For `{self.command}`. {keys}: {counts}. {defaults}{problems}"

    def as_dict(self) -> dict[str, Any]:
        """Return the report as an object for JSON."""
        return {
            "framework": self.framework,
            "command": self.command,
            "sources": list(self.sources),
            "counts": {outcome: len(self.of(outcome)) for outcome in ("mapped", "implied", "unsupported")},
            "entries": [
                {
                    "key": entry.key,
                    "value": shown(entry, shorten=False),
                    "outcome": entry.outcome,
                    "to": entry.to,
                    "result": entry.result,
                    "note": entry.note,
                    "is_default": entry.is_default,
                }
                for entry in self.entries
            ],
            "to_give": list(self.to_give),
            "notes": list(self.notes),
            "problems": list(self.problems),
        }

    def comments(self) -> str:
        """Return the report as YAML comments."""
        # A note may have several lines: a layout, and a caret under the character where it is wrong.
        lines = "\n".join(self._lines()).splitlines()
        return "".join(f"# {line}".rstrip() + "\n" for line in lines)

    def _lines(self) -> Iterator[str]:
        yield f"Converted from {self.framework} ({', '.join(self.sources)}) by `fivefold import`."
        yield self.summary()
        yield from _section("Problems", self.problems)
        yield from _section("Still to be given", self.to_give)
        yield from _section("Notes", self.notes)
        for outcome in OUTCOMES:
            yield from _section(outcome.capitalize(), [_line(entry) for entry in self.of(outcome)])
        yield from _section(f"Defaults of {self.framework}", [_line(entry) for entry in self.defaults])

    def table(self) -> KeyTable:
        """Return the report as a table for the terminal, with unsupported keys first."""
        groups = [tuple(_row(entry) for entry in self.of(outcome)) for outcome in OUTCOMES]
        groups.append(tuple(_row(entry) for entry in self.defaults))
        return KeyTable(self.summary(), (self.framework, "recipe", "why"), tuple(filter(None, groups)))


def _row(entry: Entry) -> Row:
    left = f"{entry.key}={shown(entry)}" + (" (default)" if entry.is_default else "")
    right = f"{entry.to}={_short(entry.result)}" if entry.to else entry.outcome
    return Row((left, right, entry.note), COLOURS[entry.outcome])


def shown(entry: Entry, *, shorten: bool = True) -> str:
    """Return the entry's value as text, or `***` for a secret."""
    if SECRET.search(entry.key) and entry.value not in (None, ""):
        return "***"
    return _short(entry.value) if shorten else _words(entry.value)


def _words(value: Any) -> str:
    words = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    # Control characters are not allowed in YAML, and not in its comments either.
    return " ".join("".join(character if character.isprintable() else " " for character in words).split())


def _short(value: Any) -> str:
    line = _words(value)
    return f"{line[: LONGEST_VALUE - 3]}..." if len(line) > LONGEST_VALUE else line


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield ""
        yield f"{title}:"
        yield from (indent(line, "  ") for line in lines)


def _line(entry: Entry) -> str:
    left = f"{entry.key}={shown(entry)}"
    if entry.outcome != "mapped":
        return f"{left}: {entry.outcome + ', ' if entry.is_default else ''}{entry.note}"
    return f"{left} -> {entry.to}={_short(entry.result)}" + (f" ({entry.note})" if entry.note else "")
