"""The report of the findings, and the exit code of `fivefold doctor`."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.doctor import examine
from fivefold.doctor.finding import Finding
from fivefold.doctor.report import print_summary, print_topic

FINE = Finding("Python", "ok", "3.12", "nothing to do")
BAD = Finding("GPUs", "problem", "none of 8", "pip install 'torch>=2.11' " * 4, details=("[brackets] are no markup",))


def shown(findings: list[Finding], width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    print_topic(console, "Devices", findings)
    print_summary(console, {"Devices": findings})
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_text_is_folded_to_the_width_without_a_loss() -> None:
    text = shown([FINE, BAD])
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("'torch>=2.11'") == 4
    assert "[brackets] are no markup" in text
    assert text.rstrip().endswith("1 problem.")
    assert "All is well." in shown([FINE])
    assert "…" not in shown([Finding("vLLM", "ok", "none", "for rollout.backend=vllm:d128t8p16")], width=60)


@pytest.mark.parametrize(("finding", "code"), [(FINE, 0), (BAD, 1), (Finding("CPU", "warning", "busy", "wait"), 0)])
def test_the_command_fails_on_problems_only(monkeypatch: pytest.MonkeyPatch, finding: Finding, code: int) -> None:
    asked: list[bool] = []

    def findings(*, self_test: bool) -> list[tuple[str, list[Finding]]]:
        asked.append(self_test)
        return [("Devices", [finding])]

    monkeypatch.setattr(examine, "examine", findings)
    result = CliRunner().invoke(app, ["doctor", "--json", "--no-self-test"])
    assert result.exit_code == code
    report = json.loads(result.stdout)
    assert report["status"] == finding.status
    assert report["findings"][0]["topic"] == "Devices"
    assert CliRunner().invoke(app, ["doctor"]).exit_code == code
    assert asked == [False, True]
