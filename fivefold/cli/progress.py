"""A progress bar on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, int, int], None]
"""Receives progress: the current task, units done, units in total."""


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Give a function that draws a bar for each thing that is being done, if standard error is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def draw(action: str, done: int, total: int) -> None:
            if action not in tasks:
                tasks[action] = bars.add_task(action, total=total)
            bars.update(tasks[action], completed=done)

        yield draw
