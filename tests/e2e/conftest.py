"""Runs the command line as a user does, and knows which metrics two runs share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.forked_workers import ROOT
from tests.forks import run_forked

COMMAND = [sys.executable, "-m", "fivefold"]
"""The command line as a user starts it."""
TIMED = ("seconds", "per_second", "flops", "mfu", "hfu", "busy", "idle", "wait", "bubble")
"""Parts of the names of metrics that measure time, and so differ between runs of the same bits."""


def cut_back(run: Path, step: int) -> Path:
    """Leave of a finished run its checkpoints up to `step`, and the metrics and samples of all steps.

    Returns a copy of the whole run.
    """
    whole = Path(shutil.copytree(run, run.parents[1] / "whole" / run.name))
    (run / "summary.json").unlink()
    shutil.rmtree(run / "weights")
    for checkpoint in (run / "checkpoints").glob("step-*"):
        if int(checkpoint.name.removeprefix("step-")) > step:
            shutil.rmtree(checkpoint)
    return whole


Fivefold = Callable[..., subprocess.CompletedProcess[str]]


def is_timed(metric: str) -> bool:
    """Return whether a metric measures time."""
    return any(word in metric for word in TIMED)


@pytest.fixture(scope="session")
def fivefold() -> Fivefold:
    """`fivefold(*arguments)`: the command in a process of its own, in the folder `cwd`; output as text.

    The process is forked with everything imported, which takes a third of its time otherwise.
    """

    def run(*arguments: str, timeout: float = 600, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return run_forked(arguments, cwd=cwd, environment=environment, timeout=timeout)

    return run
