"""How long the processes of each role took to get ready in earlier starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fivefold.config.source import read_mapping
from fivefold.json_text import parsed_object
from fivefold.observe.run_dir import RunDir
from fivefold.observe.timers import SUFFIX

BUILD = "build"
"""The event in which a worker loads its model or starts its server."""
FIRST = f"-0{SUFFIX}"
"""End of the names of the first ranks' files of events."""
SAME = ("actor", "rollout", "cluster")
"""Sections of a recipe that another trial must share for its times to be comparable."""


def build_seconds(run: Path) -> dict[str, float]:
    """Return the seconds that the first process of each role took in the last start with such a record.

    That is an earlier start of the run in the folder `run`, or the newest other trial of its experiment with the same
    models on the same cluster. Without any, the result is empty. Broken files of other trials are ignored.
    """
    for logs in _earlier_logs(run):
        found = {file.name.removesuffix(FIRST): _seconds(file) for file in logs.glob(f"*{FIRST}")}
        if known := {role: seconds for role, seconds in found.items() if seconds is not None}:
            return known
    return {}


def _earlier_logs(run: Path) -> Iterator[Path]:
    """Yield the log folders of earlier starts, latest first."""
    yield from sorted(RunDir(run).logs.glob("start-*"), key=_changed, reverse=True)
    own = _models(run)
    for other in sorted(run.parent.iterdir(), key=_changed, reverse=True):
        if other != run and _models(other) == own:
            yield RunDir(other).logs


def _changed(path: Path) -> float:
    """Return when a path was changed; 0 for a broken link or a path that has just been deleted."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _models(run: Path) -> dict[str, Any] | None:
    """Return the models of a run; None if the folder is not a run, or its recipe cannot be read."""
    try:
        recipe = read_mapping(RunDir(run).recipe)
    except ValueError:
        return None
    return {section: recipe.get(section) for section in SAME}


def _seconds(events: Path) -> float | None:
    """Return the seconds of the first build in an event file; None if there is none, or the file cannot be read."""
    try:
        lines = events.read_bytes().splitlines()
    except OSError:
        return None
    for line in lines:
        try:
            event = parsed_object(line)
        except ValueError:  # a killed process may leave a partial line
            continue
        if event.get("name") == BUILD and isinstance(event.get("seconds"), int | float):
            return float(event["seconds"])
    return None
