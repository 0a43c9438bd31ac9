"""What the README and the pages of docs/ hold: commands, snippets, and the metrics that a page lists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.e2e.conftest import ROOT

README = ROOT / "README.md"
DOCS = ROOT / "docs"


def blocks(document: Path, language: str) -> list[str]:
    """Return the texts of a document's fenced blocks in `language`."""
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(), flags=re.DOTALL)


def shell_commands(document: Path) -> list[list[str]]:
    """Return the arguments of each `fivefold ...` line in a document's bash blocks."""
    lines = [line.strip() for block in blocks(document, "bash") for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("fivefold ")]


def indented_commands(document: Path) -> list[tuple[dict[str, str], list[str]]]:
    """Return environment variables and arguments of each `fivefold ...` line in a document's indented blocks."""
    text = document.read_text().replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in re.findall(r"^    ((?:\w+=\w+ )?fivefold .*)$", text, re.M)]
    return [
        (dict(word.split("=") for word in line[: line.index("fivefold")]), line[line.index("fivefold") + 1 :])
        for line in lines
    ]


def listed_metrics() -> dict[str, list[Path]]:
    """Return the metrics that docs/metrics.md lists, each with the files that its section says compute it."""
    listed: dict[str, list[Path]] = {}
    for section in (DOCS / "metrics.md").read_text().split("\n## "):
        files = [ROOT / name for name in re.findall(r"`(fivefold/[\w/]+\.py)`", section)]
        for name in re.findall(r"^\| `([^`]+)` \|", section, flags=re.MULTILINE):
            assert name not in listed, f"{name} is listed twice"
            listed[name] = files
    return listed


def as_listed(metric: str) -> str:
    """Return the name under which docs/metrics.md lists a metric: `<n>` in place of its number."""
    return re.sub(r"(?<=layer_)\d+|(?<=pass_at/)\d+|(?<=entropy_quarter/)\d+|(?<=response_length/p)\d+", "<n>", metric)
