"""`fivefold report`, `fivefold watch`, `fivefold timeline` and `fivefold runs`."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.command import reporting_errors, write_text

if TYPE_CHECKING:
    from fivefold.report.run import Run

WIDE = 90
"""Characters of a line from which the list of runs has all of its columns."""
Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="Folders of runs, to be laid over each other.", show_default=False),
]
Out = Annotated[Path, typer.Option("-o", "--out", help="File to write.")]
OneRun = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)]
TraceFile = Annotated[Path, typer.Option("-o", "--out", help="File to write.")]
Steps = Annotated[
    str | None, typer.Option(metavar="FIRST-LAST", help="Only these steps, such as 10-12.", show_default=False)
]
HtmlFile = Annotated[Path | None, typer.Option(help="Write the page about the run here, too.", show_default=False)]
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
        write_text(out, content)
        typer.echo(f"{out}: {len(content.encode()) / 1e6:.1f} MB")


def watch(runs: Runs, port: Port = 0) -> None:
    """Show the same page live, for runs in progress.

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


def timeline(run: OneRun, out: TraceFile = Path("trace.json"), steps: Steps = None, html: HtmlFile = None) -> None:
    """Write when each process did what, as a trace.

    https://ui.perfetto.dev and chrome://tracing open the trace.

    \b
    Examples:
      fivefold timeline runs/quickstart/trial-0
      fivefold timeline runs/quickstart/trial-0 --steps 10-12 -o trace.json
    """
    with reporting_errors():
        import json

        from fivefold.report.page import page
        from fivefold.report.run import Run
        from fivefold.report.timeline import Timeline, chrome_trace

        read = Run.read(run)
        events = Timeline.read(read.folder.logs)
        if not events.events:
            raise ValueError(f"{run} has no events: its logs are not here, or an earlier version has made them")
        if steps is not None:
            events = events.between(*_first_and_last(steps))
        write_text(out, json.dumps(chrome_trace(events)))
        n_processes = len({event.process for event in events.events})
        typer.echo(f"{out}: {len(events.events):,} events of {n_processes} processes")
        if html is not None:
            write_text(html, page([read]))
            typer.echo(f"{html}#timeline")


def _first_and_last(steps: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", steps)
    if match is None:
        raise ValueError(f"--steps {steps}: give a step such as 12, or the first and the last one such as 10-12")
    return int(match[1]), int(match[2] or match[1])


def list_runs(folder: Folder = Path("runs"), as_json: AsJson = False) -> None:
    """List runs, and how to resume the newest one.

    \b
    Examples:
      fivefold runs
      fivefold runs runs/quickstart
    """
    with reporting_errors():
        from fivefold.report.listing import find_runs

        found, unread = find_runs(folder)
        if as_json:
            _print_json(found)
        elif found:
            _print_table(found)
        elif not unread:
            typer.echo(f"There are no runs in {folder}.")
        for line in unread:
            typer.echo(f"left out: {line}", err=True)


def _print_json(found: list[Run]) -> None:
    import json

    from fivefold.observe.jsonl import finite
    from fivefold.report.listing import n_bytes, next_command
    from fivefold.report.page import state

    for run in found:
        left = run.time_left
        facts = {"folder": str(run.folder.path), **state(run), "seconds": run.seconds}
        del facts["left"]  # a text, for people
        facts |= {"seconds_left": None if left is None else left.seconds}
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
    console = Console(highlight=False)
    goes_on = any(run.time_left is not None for run in found)
    columns = ["run", "state", "step", "best", "time"] + ["left"] * goes_on
    columns += ["size", "began"] if console.width >= WIDE else []
    for name in columns:
        table.add_column(name, justify="left" if name in ("run", "state", "began") else "right", overflow="fold")
    for run in found:
        total = f"/{run.total_steps}" if run.total_steps else ""
        best = "" if run.best is None else f"{run.best[1]:.3f}"
        began = "" if run.began is None else f"{run.began.astimezone():%Y-%m-%d %H:%M}"
        cells = {
            "run": Text(run.name),
            "state": run.state,
            "step": f"{run.step}{total}",
            "best": best,
            "time": duration(run.seconds),
            "left": "" if (left := run.time_left) is None else f"about {duration(left.seconds)}",
            "size": size(n_bytes(run.folder.path)),
            "began": began,
        }
        table.add_row(*(cells[name] for name in columns))
    console.print(table)
    if commands := [(run, command) for run in found if (command := next_command(run))]:
        (newest, command), *others = commands
        console.print(Text(f"To resume {newest.name}: {command}"), soft_wrap=True)
        if n := len(others):
            console.print(f"{n} more {'runs have' if n > 1 else 'run has'} not finished: --json has each command.")
