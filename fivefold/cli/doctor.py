"""`fivefold doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from fivefold.cli.command import FAILED, reporting_errors

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object, for programs.")]
NoSelfTest = Annotated[bool, typer.Option("--no-self-test", help="Leave the self-test out: start no processes.")]


def doctor(as_json: AsJson = False, no_self_test: NoSelfTest = False) -> None:
    """Say what this machine has, what is wrong and what to do.

    The examination ends with a self-test: two processes train a small model for one step and must get the loss that
    one process gets. The exit code is 1 if anything is a problem; warnings leave it at 0.

    \b
    Examples:
      fivefold doctor
      fivefold doctor --json --no-self-test
    """
    with reporting_errors():
        from fivefold.doctor.examine import doctor

        if not doctor(self_test=not no_self_test, as_json=as_json):
            raise typer.Exit(FAILED)
