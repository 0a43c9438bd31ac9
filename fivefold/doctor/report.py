"""The report: the findings as text for people, and as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fivefold import __version__
from fivefold.doctor.finding import NOTHING_TO_DO, STATUSES, Finding, worst

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
STATUS_WIDTH = len("warning")
NAME_WIDTH = len("TransformerEngine")
WIDTH = 100
"""Width of the lines, in characters, if the output is not a terminal."""

Topics = Mapping[str, Sequence[Finding]]


def make_console(*, quiet: bool) -> Console:
    """Return a console on standard output; with `quiet`, it prints nothing."""
    console = Console(highlight=False, quiet=quiet)
    return console if console.is_terminal else Console(highlight=False, quiet=quiet, width=WIDTH)


def print_topic(console: Console, title: str, findings: Sequence[Finding]) -> None:
    """Print the findings of a topic, one row each, folded within its columns."""
    console.print(Text(title, style="bold"))
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(width=STATUS_WIDTH, no_wrap=True)
    table.add_column(width=NAME_WIDTH)
    table.add_column(ratio=1, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    for finding in findings:
        good = finding.status == "ok"
        table.add_row(
            Text(finding.status, style=STYLES[finding.status]),
            Text(finding.name),
            Text(finding.found),
            Text(finding.advice, style="dim" if good or finding.advice == NOTHING_TO_DO else ""),
        )
    console.print(table)
    for finding in findings:
        if finding.details:
            text = Text("\n".join(finding.details), style="dim")
            console.print(Padding(text, (0, 0, 0, STATUS_WIDTH + 2)))
    console.print()


def print_summary(console: Console, topics: Topics) -> None:
    """Print the last line, which counts problems and warnings."""
    findings = [finding for each in topics.values() for finding in each]
    status = worst(findings)
    counts = {each: sum(finding.status == each for finding in findings) for each in STATUSES}
    words = [_counted(counts[each], each) for each in ("problem", "warning") if counts[each]]
    text = " and ".join(words) if words else "all is well"
    console.print(Text(f"{text[0].upper()}{text[1:]}.", style=STYLES[status]))


def as_json(topics: Topics) -> dict[str, Any]:
    """Return the worst status and every finding with its topic, as values that `json.dumps` takes."""
    findings = [finding for each in topics.values() for finding in each]
    return {
        "fivefold": __version__,
        "status": worst(findings),
        "findings": [{"topic": topic, **asdict(finding)} for topic, each in topics.items() for finding in each],
    }


def _counted(n: int, what: str) -> str:
    return f"{n} {what}" + ("s" if n > 1 else "")
