"""Runs the command line as a user does, and knows which metrics two runs share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from fivefold.checkpoints.store import Checkpoint, CheckpointStore
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


def killed_after(process: BaseProcess, run: Path, step: int, errors: Path) -> Checkpoint:
    """Kill a run once it has a checkpoint of this step or a later one; return its latest.

    Args:
        process: the run.
        run: its folder.
        step: the step.
        errors: the file with its standard error output.
    """
    checkpoints = CheckpointStore(run / "checkpoints")
    while (latest := checkpoints.latest()) is None or latest.step < step:
        assert process.is_alive(), errors.read_text()
        time.sleep(0.01)
    process.kill()
    process.join()
    latest = checkpoints.latest()
    assert latest is not None
    return latest


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
