"""The benchmark of the driver follows the code that it measures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.long
def test_a_step_of_ranks_for_which_others_stand_in_is_measured() -> None:
    words = ["--replicas=3", "--ranks=16", "--episodes=64", "--seconds=1", "--processes=1", "--minibatches=2"]
    command = [sys.executable, str(ROOT / "benchmarks" / "driver_step.py"), *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    head, names, _, row = done.stdout.splitlines()
    assert head.endswith("a generation of 1 s at most")
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert len(cells) == names.count("|") - 1
    assert cells[:3] == ["3", "16", "64"]
