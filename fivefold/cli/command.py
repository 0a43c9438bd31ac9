"""What the subcommands share: their common options, their exit codes, and how an error becomes a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from errno import ENOSPC
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.early_exit import never_early_success
from fivefold.cluster.interrupt import INTERRUPTED, interruptible
from fivefold.observe.errors import RunFailed, RunStopped

if TYPE_CHECKING:
    from fivefold.config.schema.run import RunConfig
    from fivefold.observe.screens import ScreenKind

FAILED = 1
WRONG_INPUT = 2

EXIT_CODES = f"""\b
Exit codes:
  0    it worked
  {FAILED}    the run failed
  {WRONG_INPUT}    the recipe or the command line is wrong; nothing was started
  {INTERRUPTED}  it was interrupted (Ctrl-C, SIGTERM or a closed terminal)"""
"""The last paragraph of every help text; `\\b` keeps its line breaks."""

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="Keys of the recipe to set, such as actor.optimizer.lr=2e-6.", show_default=False
    ),
]
OverwriteRun = Annotated[
    bool, typer.Option("--overwrite", help="Delete the results of an earlier run of the same name.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print notes and the end, and no table.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a line, for programs.")]
OutFolder = Annotated[Path, typer.Option("-o", "--out", help="Folder to write to.", show_default=False)]


@dataclass
class RunningCommand:
    """A subcommand while it runs."""

    recipe: RunConfig | None = None
    """The recipe, once it is loaded: an interrupted command says where its run left its results."""


def screen_kind(*, quiet: bool, as_json: bool) -> ScreenKind:
    """Return the screen that two options of a command ask for.

    Raises:
        ValueError: they contradict each other.
    """
    if quiet and as_json:
        raise ValueError("--quiet and --json are two kinds of output: give one of them")
    return "quiet" if quiet else "json" if as_json else "table"


@contextmanager
def reporting_errors(
    *, interruptible_by: Callable[[], AbstractContextManager[None]] = interruptible
) -> Iterator[RunningCommand]:
    """Turn what the body raises into one message on standard error and an exit code.

    The body raises ValueError for wrong input, OSError for a file or an address of the user's that cannot be read or
    written, RunFailed for a run that failed, and KeyboardInterrupt after the first Ctrl-C or SIGTERM. Anything else is
    a bug in Fivefold: it keeps its traceback, and Python exits with code 1.

    Args:
        interruptible_by: handles signals inside the body; `nullcontext` for a body that handles them itself.

    Raises:
        typer.Exit: with the exit code of the error.
    """
    command = RunningCommand()
    try:
        with interruptible_by(), never_early_success(FAILED):
            yield command
    except RunStopped as stop:
        typer.echo(f"\n{stop}\n{_how_to_go_on()}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except KeyboardInterrupt:
        typer.echo(_saved_results(command.recipe), err=True)
        raise typer.Exit(INTERRUPTED) from None
    except RunFailed as error:
        typer.echo(f"\nThe run failed: {error}", err=True)
        raise typer.Exit(FAILED) from None
    except BrokenPipeError:
        raise  # the reader of the output has ended, as in `fivefold plan recipe.yaml | head`: click ends quietly
    except OSError as error:
        typer.echo(f"Error: {_reason(error)}", err=True)
        raise typer.Exit(WRONG_INPUT) from None
    except ValueError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(WRONG_INPUT) from None


def _reason(error: OSError) -> str:
    """Return the path and what is wrong with it; the whole message if the error is not about a path."""
    if error.filename is None or error.strerror is None:
        return str(error)
    fix = "free some space, or name another path" if error.errno == ENOSPC else "name a path that you may use"
    return f"{error.filename}: {error.strerror}; {fix}"


def write_text(path: Path, text: str) -> None:
    """Write a file of the user's.

    Raises:
        OSError: it cannot be written; the error names it, and no part of the text is left there.
    """
    from fivefold.observe.durable import naming

    with naming(path):
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            if error.errno == ENOSPC and path.is_file():
                path.unlink()
            raise


def _saved_results(recipe: RunConfig | None) -> str:
    """Return the message that lists what an interrupted run of `recipe` has saved."""
    from fivefold.observe.run_dir import RunDir

    if recipe is None or not (run := RunDir.of(recipe)).is_ours():
        return "Nothing was saved."
    saved = run.saved()
    lines = [f"Saved in {run.path}:", *(f"  {name:<12}{path.name}" for name, path in saved.items())]
    return "\n".join([*lines, _how_to_go_on()] if "checkpoints" in saved else lines)


def _how_to_go_on() -> str:
    """Return how to resume the run from its last checkpoint."""
    from fivefold.observe.machine import command_line

    return f"To resume, run the same command again: {command_line()}"
