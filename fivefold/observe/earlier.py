"""What earlier starts tell of the next one: how long the processes of each role took until they were ready."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fivefold.config.source import read_mapping
from fivefold.observe.events import SUFFIX
from fivefold.observe.run_dir import RunDir

BUILD = "build"
"""The event in which a worker loads its model or starts its server."""
FIRST = f"-0{SUFFIX}"
"""End of the names of the first ranks' files of events."""
SAME = ("actor", "rollout", "cluster")
"""Sections of a recipe that another trial must share, for its times to be like this one's."""


def build_seconds(run: Path) -> dict[str, float]:
    """Return the seconds that the first process of each role took, at the last start that tells.

    That is an earlier start of the run in the folder `run`, or the newest other trial of its experiment with the same
    models on the same cluster. Without any, nothing is returned. What is wrong with another trial's files is no matter
    of this run, which starts without them.
    """
    for logs in _earlier_logs(run):
        found = {file.name.removesuffix(FIRST): _seconds(file) for file in logs.glob(f"*{FIRST}")}
        if known := {role: seconds for role, seconds in found.items() if seconds is not None}:
            return known
    return {}


def _earlier_logs(run: Path) -> Iterator[Path]:
    """Yield the folders of logs of earlier starts, the last one first."""
    yield from sorted(RunDir(run).logs.glob("start-*"), key=_changed, reverse=True)
    own = _models(run)
    for other in sorted(run.parent.iterdir(), key=_changed, reverse=True):
        if other != run and _models(other) == own:
            yield RunDir(other).logs


def _changed(path: Path) -> float:
    """Return when a path was changed; 0 for a link to nothing, and for one that has just been deleted."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _models(run: Path) -> dict[str, Any] | None:
    """Return the models of a run; None if it is none, or its recipe cannot be read."""
    try:
        recipe = read_mapping(RunDir(run).recipe)
    except ValueError:
        return None
    return {section: recipe.get(section) for section in SAME}


def _seconds(events: Path) -> float | None:
    """Return the seconds of the first build in a file of events; None if there is none, or it cannot be read."""
    try:
        lines = events.read_bytes().splitlines()
    except OSError:
        return None
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:  # a process that was killed may leave half a line
            continue
        if event.get("name") == BUILD:
            return float(event["seconds"])
    return None
