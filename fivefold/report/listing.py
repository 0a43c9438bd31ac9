"""The runs below a folder, newest first."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from fivefold.observe.run_dir import GOING_ON, STATUS
from fivefold.report.run import Run

MOST_LEVELS = 4
"""Levels of folders below which no runs are looked for."""


def find_runs(folder: Path) -> tuple[list[Run], list[str]]:
    """Return the runs in `folder` and below it, the one that was started last first, and a line for each that is left
    out because its files cannot be read.

    Raises:
        ValueError: there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder: name the folder of runs, which is cluster.fileroot of their recipes"
        )
    runs: list[Run] = []
    unread: list[str] = []
    for path in _folders(folder, unread):
        try:
            runs.append(Run.read(path))
        except (OSError, ValueError) as error:
            unread.append(str(error))
    return sorted(runs, key=lambda run: str(run.status.get("began", "")), reverse=True), unread


def _folders(folder: Path, unread: list[str]) -> Iterator[Path]:
    """Yield the folders of runs; folders that cannot be opened are added to `unread`."""
    for parent, children, files in os.walk(folder, onerror=lambda error: unread.append(str(error))):
        path = Path(parent)
        if STATUS in files:
            yield path
            children.clear()
        elif len(path.relative_to(folder).parts) == MOST_LEVELS:
            children.clear()
        else:
            children[:] = sorted(name for name in children if not name.startswith("."))


def n_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    total = 0
    for parent, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # a resumed run has replaced it
                continue
    return total


def next_command(run: Run) -> str:
    """Return the command that continues a run that has not finished, from this folder; an empty text for one that
    needs none.
    """
    command = str(run.about.get("command", ""))
    if run.state == "finished" or run.state in GOING_ON or not command:
        return ""
    folder = str(run.about.get("folder", Path.cwd()))  # its recipe and its outputs may be named from there
    return command if Path(folder) == Path.cwd() else f"cd {shlex.quote(folder)} && {command}"
