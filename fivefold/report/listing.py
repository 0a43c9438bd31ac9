"""The runs below a folder, newest first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from fivefold.observe.run_dir import GOING_ON, STATUS
from fivefold.report.run import Run

MOST_LEVELS = 4
"""Levels of folders below which no runs are looked for."""


def find_runs(folder: Path) -> list[Run]:
    """Return the runs in `folder` and below it, the one that was started last first.

    Raises:
        ValueError: there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder: name the folder of runs, which is cluster.fileroot of their recipes"
        )
    runs = [Run.read(path) for path in _folders(folder, 0)]
    return sorted(runs, key=lambda run: str(run.status.get("began", "")), reverse=True)


def _folders(folder: Path, level: int) -> Iterator[Path]:
    if (folder / STATUS).is_file():
        yield folder
    elif level < MOST_LEVELS:
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
                yield from _folders(path, level + 1)


def n_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # a run that goes on has replaced it
                continue
    return total


def next_command(run: Run) -> str:
    """Return the command that goes on with a run that has not finished; an empty text for one that needs none."""
    if run.state == "finished" or run.state in GOING_ON:
        return ""
    return str(run.about.get("command", ""))
