"""The built-in tool `python`: programs of the model, in the sandbox that rewards of programs have."""

from __future__ import annotations

from fivefold.rewards.sandbox.runner import Sandbox, missing, run

MOST_CHARACTERS = 4000
"""Most characters of a program's output that the model reads."""
_PROGRAM = """\
import sys, traceback
try:
    exec(compile({code!r}, "<program>", "exec"), {{"__name__": "__main__"}})
except SystemExit:
    pass
except BaseException as error:
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
    traceback.print_exception(error, file=sys.stdout)
"""


def run_program(code: str, sandbox: Sandbox) -> str:
    """Return what a program prints, or how it was ended."""
    result = run(_PROGRAM.format(code=code), {"asks": "output"}, sandbox=sandbox)
    text = result.output.decode(errors="replace")
    if len(text) > MOST_CHARACTERS:
        text = f"{text[:MOST_CHARACTERS]}\n... and {len(text) - MOST_CHARACTERS:,} characters more"
    if not result.is_complete:
        text += f"\nThe program was ended: {result.ended}"
    return text.strip() or "The program has printed nothing."


def python(code: str) -> str:
    """Run a Python program and return what it prints. It has no network and no files of yours.

    Args:
        code: the program; print what you want to see
    """
    return run_program(code, Sandbox())


def check_python() -> None:
    """Refuse a machine on which programs of the model could not be closed in.

    Raises:
        ValueError: it lacks something.
    """
    if lacks := missing():
        raise ValueError(
            f"environment.tools has python, which runs programs of the model, and this machine lacks "
            f"{' and '.join(lacks.values())}: name functions of yours, or run where the kernel has it"
        )
