"""`fivefold checkpoints`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fivefold.cli.command import FAILED, reporting_errors
from fivefold.cli.progress import progress_bar
from fivefold.cli.size import size
from fivefold.config.limits import LARGEST

if TYPE_CHECKING:
    from rich.table import Table

    from fivefold.checkpoints.listing import Listing, Row
    from fivefold.checkpoints.store import Checkpoint

Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or of a single checkpoint.")]
Verify = Annotated[
    bool, typer.Option("--verify", help="Compare the checksum of every file; the exit code is 1 if one differs.")
]
Export = Annotated[
    str | None,
    typer.Option(metavar="WHICH", help="Write the model of a step, latest or best as a Hugging Face folder."),
]
Out = Annotated[Path | None, typer.Option("-o", "--out", help="With --export: folder to write to.", show_default=False)]
WeightType = Annotated[
    Literal["float32", "bfloat16"] | None,
    typer.Option(help="With --export: number format of the weights.  [default: as in the run]", show_default=False),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="With --export: folder or hub name of the model's config and tokenizer.  [default: the run's actor.path]",
        show_default=False,
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="With --export: replace an earlier model folder.")]
Prune = Annotated[
    int | None,
    typer.Option(
        metavar="KEEP", min=1, max=LARGEST, help="Delete all but the newest KEEP and the best.", show_default=False
    ),
]


def checkpoints(
    run: Run,
    verify: Verify = False,
    export: Export = None,
    out: Out = None,
    dtype: WeightType = None,
    model: Model = None,
    overwrite: Overwrite = False,
    prune: Prune = None,
) -> None:
    """List the checkpoints of a run; verify, export or prune them.

    \b
    Examples:
      fivefold checkpoints runs/quickstart/trial-0
      fivefold checkpoints runs/quickstart/trial-0 --verify
      fivefold checkpoints runs/quickstart/trial-0 --export best -o models/best
      fivefold checkpoints runs/quickstart/trial-0 --prune 1
    """
    with reporting_errors():
        from fivefold.checkpoints.listing import find_checkpoints

        if sum((verify, export is not None, prune is not None)) > 1:
            raise ValueError("--verify, --export and --prune exclude each other: give one at a time")
        if export is None and (out or dtype or model or overwrite):
            raise ValueError("--out, --dtype, --model and --overwrite belong to --export: add it, or drop them")
        found = find_checkpoints(run)
        if export is not None:
            _export(found, export, out, dtype, model, overwrite)
        elif prune is not None:
            _prune(found, run, prune)
        else:
            _list(found, verify)


def _list(found: list[Checkpoint], verify: bool) -> None:
    """Print a table of the checkpoints and what is wrong with them.

    Raises:
        typer.Exit: with exit code 1, if anything is wrong.
    """
    listing = _examined(found, deep=verify)
    _print(_table(listing))
    for problem in (problem for row in listing.rows for problem in row.problems):
        typer.echo(f"- {problem}", err=True)
    if any(row.problems for row in listing.rows):
        raise typer.Exit(FAILED)
    if verify:
        n_files = sum(len(row.content.files) for row in listing.rows if row.content is not None)
        typer.echo(f"The checksums of all {n_files:,} files agree.")


def _export(
    found: list[Checkpoint], which: str, out: Path | None, dtype: str | None, model: str | None, overwrite: bool
) -> None:
    from fivefold.checkpoints.listing import choose
    from fivefold.convert.target import free_target

    if out is None:
        raise ValueError("--export needs a folder to write to: give one with --out")
    chosen = choose(found, which)
    target = free_target(out, overwrite=overwrite)
    if problems := [problem for row in _examined([chosen], deep=True).rows for problem in row.problems]:
        raise ValueError("\n- ".join([f"{chosen.path} is damaged, so its model is not exported:", *problems]))
    from fivefold.checkpoints.export import export_model

    with progress_bar() as progress:
        shape = export_model(
            chosen,
            target,
            model=model,
            dtype=dtype,
            on_elements=lambda done, total: progress("writing", done, total),
        )
    typer.echo(f"{out}: {shape.family}, {shape.n_parameters / 1e6:,.1f} M parameters, of step {chosen.step}")


def _prune(found: list[Checkpoint], run: Path, keep: int) -> None:
    from fivefold.checkpoints.listing import history
    from fivefold.checkpoints.store import CheckpointStore

    root = found[0].path.parent
    if run.resolve() == found[0].path:
        raise ValueError(f"{run} is a single checkpoint: give the folder of its run")
    values = history(found)
    best = None if values is None else values.best([each.step for each in found])
    deleted = CheckpointStore(root).prune(keep, () if best is None else (best,))
    kept = [each.step for each in found if each.step not in deleted]
    typer.echo(f"Deleted {_steps(deleted)}; kept {_steps(kept)}.")


def _examined(found: list[Checkpoint], *, deep: bool) -> Listing:
    """Compare checkpoints with their manifests, with a progress bar if every file is read."""
    from fivefold.checkpoints.listing import examine

    if not deep:
        return examine(found, deep=False)
    total = sum(row.content.n_bytes for row in examine(found, deep=False).rows if row.content is not None)
    done, lock = 0, Lock()
    with progress_bar() as progress:

        def count(n_bytes: int) -> None:
            nonlocal done
            with lock:
                done += n_bytes
                progress("comparing checksums", done, total)

        return examine(found, deep=True, on_bytes=count)


def _table(listing: Listing) -> Table:
    from rich.table import Table

    metric = None if listing.history is None else listing.history.name
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("step", justify="right")
    table.add_column("saved")
    table.add_column("size", justify="right")
    table.add_column("files", justify="right")
    table.add_column("state")
    if metric is not None:
        table.add_column(metric, justify="right", overflow="fold")
        table.add_column("")
    for row in listing.rows:
        best = "best" if row.checkpoint.step == listing.best else ""
        values = [] if metric is None else [_value(listing, row), best]
        table.add_row(str(row.checkpoint.step), *_facts(row), *values)
    return table


def _facts(row: Row) -> tuple[str, str, str, str]:
    state = "damaged" if row.problems else "whole"
    if row.content is None:
        return "", "", "", state
    saved = datetime.fromisoformat(row.content.saved).astimezone()
    return f"{saved:%Y-%m-%d %H:%M}", size(row.content.n_bytes), f"{len(row.content.files)}", state


def _value(listing: Listing, row: Row) -> str:
    value = None if listing.history is None else listing.history.values.get(row.checkpoint.step)
    return "" if value is None else f"{value:.4g}"


def _steps(steps: list[int]) -> str:
    if not steps:
        return "no step"
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(map(str, steps))


def _print(table: Table) -> None:
    from rich.console import Console

    Console(highlight=False).print(table)
