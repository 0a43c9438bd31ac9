"""`fivefold data`: a subcommand for each task whose problems Fivefold can write."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.command import OutFolder, reporting_errors
from fivefold.config.limits import LARGEST_SEED

data_app = typer.Typer(help="Write the problems of a task to files.", no_args_is_help=True, rich_markup_mode=None)
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="The same seed gives the same files.")]


@data_app.command()
def arithmetic(out: OutFolder, seed: Seed = 1) -> None:
    """Sums and differences of several numbers: the quickstart's task, and the demonstrations its model learnt from."""
    with reporting_errors():
        from fivefold.data.arithmetic import write_arithmetic

        _print_row_counts(write_arithmetic(out, seed=seed).values())


@data_app.command()
def additions(out: OutFolder, seed: Seed = 1) -> None:
    """Sums of two numbers, asked with worked examples: the task of recipes/smollm2-addition.yaml."""
    with reporting_errors():
        from fivefold.data.additions import write_additions

        _print_row_counts(write_additions(out, seed=seed))


def _print_row_counts(paths: Iterable[Path]) -> None:
    for path in paths:
        with path.open(encoding="utf-8") as file:
            typer.echo(f"{path}  {sum(1 for _ in file):,} rows")
