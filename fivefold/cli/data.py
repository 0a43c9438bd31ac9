"""`fivefold data`: a subcommand for each task whose problems Fivefold can write."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.command import OutFolder, reporting_errors
from fivefold.config.limits import LARGEST_SEED

data_app = typer.Typer(
    help="Write the problems of a task, or of a data set, to files.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="The same seed gives the same files.")]

Source = Annotated[
    str | None,
    typer.Option(
        help="Downloaded folder or file, a hub name, or modelscope:<name>.  [default: the data set on the hub]",
        show_default=False,
    ),
]


@data_app.command()
def arithmetic(out: OutFolder, seed: Seed = 1) -> None:
    """Sums and differences of several numbers: the quickstart's task, and its model's demonstrations."""
    with reporting_errors():
        from fivefold.data.arithmetic import write_arithmetic
        from fivefold.observe.durable import naming

        with naming(out):
            files = write_arithmetic(out, seed=seed)
        _print_row_counts(files.values())


@data_app.command()
def additions(out: OutFolder, seed: Seed = 1) -> None:
    """Sums of two numbers, asked with worked examples: the task of recipes/smollm2-addition.yaml."""
    with reporting_errors():
        from fivefold.data.additions import write_additions
        from fivefold.observe.durable import naming

        with naming(out):
            files = write_additions(out, seed=seed)
        _print_row_counts(files)


@data_app.command()
def tools(out: OutFolder, seed: Seed = 1) -> None:
    """Sums for a calculator, questions about made-up facts, and conversations that call tools for both."""
    with reporting_errors():
        from fivefold.data.tool_calls import write_tool_calls
        from fivefold.observe.durable import naming

        with naming(out):
            files = write_tool_calls(out, seed=seed)
        _print_row_counts(files.values())


def _write_task(name: str, source: str | None, out: Path) -> None:
    with reporting_errors():
        from fivefold.data.tasks import write_task
        from fivefold.observe.durable import naming

        with naming(out):
            counts = write_task(name, source, out)
        for path, count in counts.items():
            typer.echo(f"{path}  {count:,} rows")


@data_app.command()
def gsm8k(out: OutFolder, source: Source = None) -> None:
    """GSM8K (grade-school problems) as parquet files in verl's schema."""
    _write_task("gsm8k", source, out)


@data_app.command()
def math(out: OutFolder, source: Source = None) -> None:
    """MATH (competition problems with worked solutions) as parquet files in verl's schema."""
    _write_task("math", source, out)


@data_app.command()
def math500(out: OutFolder, source: Source = None) -> None:
    """MATH-500, for evaluation, as a parquet file in verl's schema."""
    _write_task("math500", source, out)


@data_app.command()
def deepscaler(out: OutFolder, source: Source = None) -> None:
    """DeepScaleR's 40,000 problems as parquet files in verl's schema: `train`, and one in 80 held out as `test`."""
    _write_task("deepscaler", source, out)


@data_app.command()
def aime24(out: OutFolder, source: Source = None) -> None:
    """AIME 2024, for evaluation, as a parquet file in verl's schema."""
    _write_task("aime24", source, out)


def _print_row_counts(paths: Iterable[Path]) -> None:
    for path in paths:
        with path.open(encoding="utf-8") as file:
            typer.echo(f"{path}  {sum(1 for _ in file):,} rows")
