"""`fivefold import`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.command import reporting_errors
from fivefold_import.framework import Framework

if TYPE_CHECKING:
    from fivefold_import.report import Report

Sources = Annotated[
    list[str], typer.Argument(metavar="FILE|KEY=VALUE", help="YAML files, launch scripts, and keys of theirs to set.")
]
SourceFramework = Annotated[Framework, typer.Option("--from", help="Framework that the files are written for.")]
RecipeFile = Annotated[Path, typer.Option("-o", "--out", help="The recipe to write.", show_default=False)]
Strict = Annotated[bool, typer.Option("--strict", help="Fail if anything is unsupported, or a problem is found.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the recipe if it exists.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON, for programs.")]


def import_recipe(
    files: Sources,
    framework: SourceFramework,
    out: RecipeFile,
    strict: Strict = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Turn another framework's configuration into a recipe.

    A report says what became of each of its keys.

    \b
    Example:
      fivefold import --from verl run_qwen3.sh -o recipe.yaml
    """
    with reporting_errors():
        from fivefold_import.recipe import import_recipe, split_arguments

        paths, overrides = split_arguments(files)
        report = import_recipe(
            framework, paths, overrides, out, strict=strict, overwrite=overwrite, on_report=_print_table
        )
        if as_json:
            typer.echo(json.dumps({**report.as_dict(), "recipe": str(out)}, indent=2))
        give = "give the values that are ??? in it, then: " if report.to_give else ""
        typer.echo(f"Wrote {out}. Next: {give}fivefold plan {shlex.quote(str(out))}", err=True)


def _print_table(report: Report) -> None:
    """Print the report on standard error, which leaves standard output to the JSON."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    console.print(report.table())
    for note in report.notes:
        console.print(f"Note: {note}", markup=False, soft_wrap=True)
    for key in report.to_give:
        console.print(f"Still to be given: {key}", style="yellow", markup=False, soft_wrap=True)
    for problem in report.problems:
        console.print(f"Problem: {problem}", style="red", markup=False, soft_wrap=True)
