"""The exit code of a command in whose process code calls `os._exit`."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from fivefold.cli.command import reporting_errors
with reporting_errors():
    if sys.argv[1] == "child":
        child = os.fork()
        if child == 0:
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    else:
        os._exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("argument", "code", "said"), [("0", 1, True), ("256", 1, True), ("7", 7, False), ("child", 0, False)]
)
def test_no_command_succeeds_before_its_end(argument: str, code: int, said: bool) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, argument], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert (f"called os._exit({argument}) before the command came to its end" in done.stderr) == said
    assert done.stdout == ("0\n" if argument == "child" else "")
