"""Runs the command line as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "fivefold"]

Fivefold = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def fivefold() -> Fivefold:
    """`fivefold(*arguments)`: the command in a process of its own, in the folder `cwd`; output as text."""

    def run(*arguments: str, timeout: float = 240, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [*COMMAND, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=cwd,
            env=environment,
            check=False,
        )

    return run
