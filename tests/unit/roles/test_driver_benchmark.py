"""The benchmark of the driver follows the code that it measures."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "driver_step.py"


def test_the_cost_of_every_part_of_a_step_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(BENCHMARK), "--tokens", "40000", "--sequence", "512"])
    runpy.run_path(str(BENCHMARK), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("64 sequences of 8 groups, megatron:d8t2c2")
    assert [line.split("  ")[1] for line in lines[1:]] == [
        *("requests", "samples", "metrics", "advantages", "orders of the log-probs", "mini-batches"),
        *("orders of the updates", "together"),
    ]
