"""The `fivefold` command: its subcommands, and what holds for all of them.

The modules of the subcommands declare arguments and options and import nothing else, so that `--help` is quick.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fivefold import __version__
from fivefold.cli.checkpoints import checkpoints
from fivefold.cli.command import EXIT_CODES
from fivefold.cli.convert import convert
from fivefold.cli.data import data_app
from fivefold.cli.doctor import doctor
from fivefold.cli.evaluate import evaluate
from fivefold.cli.generate import generate
from fivefold.cli.import_recipe import import_recipe
from fivefold.cli.plan import plan
from fivefold.cli.play import play
from fivefold.cli.report import list_runs, report, timeline, watch
from fivefold.cli.training import TRAINING, training_command
from fivefold.cli.witness import WITNESSED
from fivefold.cluster.interrupt import keep_exit_statuses


class _App(typer.Typer):
    """The command as a shell starts it; tests call it inside their process, and not through this class."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, obj=WITNESSED, **kwargs)


app = _App(
    name="fivefold",
    help="Reinforcement learning for large language models on Megatron-Core.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={
        "help_option_names": ["-h", "--help"],
        # Without it, a call such as `fivefold train --help` leaves the group's own options without values, which Typer
        # imports pydantic to convert: that takes longer than all the rest.
        "default_map": {"help": False, "install_completion": False, "show_completion": False},
    },
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fivefold {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Reinforcement learning for large language models on Megatron-Core."""
    keep_exit_statuses()


for name, text in TRAINING.items():
    app.command(name, help=text, epilog=EXIT_CODES)(training_command(name))
app.command("eval", epilog=EXIT_CODES)(evaluate)
app.command("generate", epilog=EXIT_CODES)(generate)
app.command("play", epilog=EXIT_CODES)(play)
app.command("plan", epilog=EXIT_CODES)(plan)
app.command("import", epilog=EXIT_CODES)(import_recipe)
app.command("convert", epilog=EXIT_CODES)(convert)
app.command("checkpoints", epilog=EXIT_CODES)(checkpoints)
app.command("runs", epilog=EXIT_CODES)(list_runs)
app.command("report", epilog=EXIT_CODES)(report)
app.command("watch", epilog=EXIT_CODES)(watch)
app.command("timeline", epilog=EXIT_CODES)(timeline)
app.add_typer(data_app, name="data")
app.command("doctor", epilog=EXIT_CODES)(doctor)
