"""`fivefold report`, `fivefold watch` and `fivefold runs`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.command import reporting_errors

if TYPE_CHECKING:
    from fivefold.report.run import Run

Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="Folders of runs, to be laid over each other.", show_default=False),
]
Out = Annotated[Path, typer.Option("-o", "--out", help="File to write.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at; 0: a free one.")]
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder below which runs are looked for.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for each run, for programs.")]


def report(runs: Runs, out: Out = Path("report.html")) -> None:
    """Write one page about runs: curves, samples, recipe.

    The page is one file that needs no network.

    \b
    Examples:
      fivefold report runs/quickstart/trial-0
      fivefold report runs/quickstart/trial-0 runs/quickstart/trial-1 -o both.html
    """
    with reporting_errors():
        from fivefold.report.page import page
        from fivefold.report.run import Run

        content = page([Run.read(path) for path in runs])
        out.write_text(content, encoding="utf-8")
        typer.echo(f"{out}: {len(content.encode()) / 1e6:.1f} MB")


def watch(runs: Runs, port: Port = 0) -> None:
    """Show the same page live, for runs that go on.

    The page is served to this machine alone, under an address with a token, until Ctrl-C. To see it from another
    machine, lead its port there: ssh -L 8000:127.0.0.1:8000 HOST.

    \b
    Examples:
      fivefold watch runs/quickstart/trial-0
      fivefold watch runs/quickstart/trial-0 --port 8000
    """
    with reporting_errors(interruptible_by=nullcontext):
        from fivefold.report.live import watch

        watch(runs, port, lambda address: typer.echo(f"{address}\nPress Ctrl-C to end."))


def list_runs(folder: Folder = Path("runs"), as_json: AsJson = False) -> None:
    """List runs, and the commands that go on with them.

    \b
    Examples:
      fivefold runs
      fivefold runs runs/quickstart
    """
    with reporting_errors():
        from fivefold.report.listing import find_runs

        found = find_runs(folder)
        if as_json:
            _print_json(found)
        elif not found:
            typer.echo(f"There are no runs in {folder}.")
        else:
            _print_table(found)


def _print_json(found: list[Run]) -> None:
    import json

    from fivefold.observe.jsonl import finite
    from fivefold.report.listing import n_bytes, next_command
    from fivefold.report.page import state

    for run in found:
        facts = {"folder": str(run.folder.path), **state(run), "seconds": run.seconds}
        facts |= {"bytes": n_bytes(run.folder.path), "command": next_command(run) or None}
        typer.echo(json.dumps(finite(facts)))


def _print_table(found: list[Run]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from fivefold.cli.size import size
    from fivefold.report.listing import n_bytes, next_command
    from fivefold.report.run import duration

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "state", "step", "best", "time", "size", "began"):
        table.add_column(name, justify="right" if name in ("step", "best", "time", "size") else "left", overflow="fold")
    for run in found:
        total = f"/{run.total_steps}" if run.total_steps else ""
        best = "" if run.best is None else f"{run.best[1]:.3f}"
        began = "" if run.began is None else f"{run.began.astimezone():%Y-%m-%d %H:%M}"
        taken, used = duration(run.seconds), size(n_bytes(run.folder.path))
        table.add_row(Text(run.name), run.state, f"{run.step}{total}", best, taken, used, began)
    console = Console(highlight=False)
    console.print(table)
    for run in found:
        if command := next_command(run):
            console.print(Text(f"{run.name} goes on with: {command}"), soft_wrap=True)
