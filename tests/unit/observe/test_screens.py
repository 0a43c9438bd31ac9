"""Screens without a table: for programs, and for people who want to see nothing but the end."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.observe import console as console_module
from fivefold.observe.columns import TRAIN_COLUMNS
from fivefold.observe.console import RunConsole
from fivefold.observe.progress import counting
from fivefold.observe.screens import ScreenKind, open_screen
from fivefold.observe.timers import PhaseTimers

METRICS = {
    "reward/mean": 0.25,
    "accuracy": 0.5,
    "entropy": 1.2,
    "lr": 1e-6,
    "tokens_per_second": 5e4,
    "grad_norm": float("nan"),
}
SECONDS = {"rollout": 8.0, "old log-probs": 0.5, "train": 3.5, "weight sync": 0.1}


def show(screen: RunConsole, timers: PhaseTimers) -> None:
    """Show a run of three steps, of which the second is the best."""
    with screen:
        screen.banner("sums / trial-0", {"model": "tiny", "warnings": "2 devices are not used"})
        screen.start(n_steps=3)
        for step, accuracy in ((1, 0.5), (2, 0.875), (3, 0.75)):
            with timers.phase("rollout"):
                screen.step(step, METRICS | {"accuracy": accuracy}, SECONDS)
            screen.samples(step, [(1.0, "2+3=", "5")])
        screen.note("held-out accuracy after step 3: 0.9", style="cyan")
        screen.end("finished in 9 s", {"weights": "runs/sums/trial-0/weights"})


def printed(kind: ScreenKind, capsys: pytest.CaptureFixture[str]) -> str:
    timers = PhaseTimers()
    show(open_screen(kind, TRAIN_COLUMNS, timers), timers)
    return capsys.readouterr().out


def test_json_is_one_object_a_line_with_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    events = [json.loads(line) for line in printed("json", capsys).splitlines()]
    assert [event["event"] for event in events] == ["start", *["step", "samples"] * 3, "note", "end"]
    assert events[0]["facts"]["model"] == "tiny"
    assert events[3]["metrics"] == METRICS | {"accuracy": 0.875, "grad_norm": None}
    assert (events[3]["step"], events[3]["of"], events[3]["seconds"]) == (2, 3, SECONDS)
    assert events[3]["seconds_left"] >= 0
    assert events[5]["seconds_left"] is None
    assert events[-1] == {"event": "end", "title": "finished in 9 s", "facts": {"weights": "runs/sums/trial-0/weights"}}


def test_json_is_all_that_a_program_reads(capsys: pytest.CaptureFixture[str]) -> None:
    with open_screen("json", TRAIN_COLUMNS, PhaseTimers()) as screen:
        print("what a tracker or a reward function says")
        screen.note("a note")
    out, err = capsys.readouterr()
    assert json.loads(out) == {"event": "note", "text": "a note"}
    assert err == "what a tracker or a reward function says\n"


@pytest.mark.parametrize("kind", ["table", "json"])
def test_without_a_terminal_what_goes_on_is_told_after_a_minute_without_a_line(
    kind: ScreenKind, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_module, "SILENCE_S", 0.0)
    with open_screen(kind, TRAIN_COLUMNS, PhaseTimers()), counting("loading weights", 8) as count:
        count(2)
        told = ""
        while "setup 25%" not in told:
            time.sleep(0.05)
            told += capsys.readouterr().out
    if kind == "json":
        assert json.loads(told.splitlines()[0])["event"] == "progress"


def test_quiet_says_warnings_notes_and_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed("quiet", capsys).splitlines() == [
        "warnings: 2 devices are not used",
        "held-out accuracy after step 3: 0.9",
        "finished in 9 s",
    ]


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_table_has_fewer_columns_on_a_narrow_screen_and_no_cut_ones(width: int, terminal: bool) -> None:
    out, timers = io.StringIO(), PhaseTimers()
    console = Console(file=out, width=width, force_terminal=terminal, highlight=False)
    show(RunConsole(TRAIN_COLUMNS, timers, console), timers)
    assert "…" not in out.getvalue()
    assert "2, training accuracy 0.875" in out.getvalue()
    if not terminal:
        assert max(map(len, out.getvalue().splitlines())) <= width


def test_quiet_and_json_exclude_each_other() -> None:
    result = CliRunner().invoke(app, ["train", "recipes/quickstart.yaml", "--quiet", "--json"])
    assert result.exit_code == 2
    assert "--quiet and --json are two kinds of output" in result.output


PROGRAM = """
import sys
from fivefold.observe.screens import open_screen
from fivefold.observe.timers import PhaseTimers
with open_screen(sys.argv[1], [], PhaseTimers()) as screen:
    screen.note("begun")
    sys.stdin.readline()
    screen.note("nobody reads this")
    screen.note("nor this")
print("went on", file=sys.stderr)
"""


@pytest.mark.parametrize("kind", ["table", "json"])
def test_a_run_goes_on_when_the_reader_of_its_output_has_ended(kind: str) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", PROGRAM, kind], text=True, **pipes) as process:  # type: ignore[call-overload]
        assert "begun" in process.stdout.readline()
        process.stdout.close()
        assert process.communicate("\n", timeout=120)[1] == "went on\n"
    assert process.returncode == 0
