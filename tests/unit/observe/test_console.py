from __future__ import annotations

import io
import math
import re
import time

import pytest
from rich.console import Console

from fivefold.experience.samples import are_shown, extremes
from fivefold.observe.columns import PAIR_COLUMNS, SFT_COLUMNS, TRAIN_COLUMNS, Column
from fivefold.observe.console import HEADER_EVERY, RunConsole
from fivefold.observe.output import FILE_WIDTH
from fivefold.observe.status_line import clock
from fivefold.observe.table import StepTable, number
from fivefold.observe.timers import PhaseTimers
from fivefold.types import Prompt, Sample

METRICS = {
    "reward/mean": 0.312,
    "accuracy": 0.25,
    "ppo_kl_k3": 1.234e-5,
    "entropy": 1.204,
    "clip_fraction": 0.031,
    "grad_norm": 12.345,
    "lr": 1e-6,
    "response_length/mean": 213.6,
    "tokens_per_second": 31234.0,
}
NARROW = ["seconds", "rollout", "train", "rest"]
SECONDS = {"rollout": 8.04, "reward": 0.11, "old log-probs": 0.52, "train": 3.61, "weight sync": 0.49}


def screen(width: int, terminal: bool, timers: PhaseTimers | None = None) -> tuple[RunConsole, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, highlight=False)
    return RunConsole(TRAIN_COLUMNS, timers or PhaseTimers(), console), out


def run(width: int, terminal: bool, steps: int = 2) -> list[str]:
    """Return everything that a run prints, as lines without colours and cursor movements."""
    timers = PhaseTimers()
    console, out = screen(width, terminal, timers)
    with console:
        console.banner("arithmetic / trial-0", {"model": "package:tiny-moe", "actor": "megatron:(attn:d1t2|ffn:e2)"})
        console.start(n_steps=steps)
        for step in range(1, steps + 1):
            with timers.phase("rollout"):
                console.step(step, METRICS, SECONDS)
        console.note("evaluation after step 2: accuracy 0.71")
        console.end("finished in 0:25", {"weights": "runs/arithmetic/trial-0/weights"})
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n")
    return [line for line in plain.splitlines() if line.strip()]


def test_the_banner_takes_the_place_of_the_status_line() -> None:
    """Whatever has been drawn before it: the line is drawn by another thread, too."""
    console, out = screen(100, terminal=True)
    with console:
        console.banner("arithmetic / trial-0", {"model": "package:tiny-moe"})
    before, _, _ = out.getvalue().partition("arithmetic / trial-0")
    erased = before.rindex("\r\x1b[2K")
    assert re.fullmatch(r"(\x1b\[[0-9;]*m|[╭─ ])*", before[erased:].removeprefix("\r\x1b[2K"))


@pytest.mark.parametrize("width", [100, 160])
@pytest.mark.parametrize("terminal", [False, True])
def test_lines_fit_and_align(width: int, terminal: bool) -> None:
    lines = run(width, terminal)
    assert max(map(len, lines)) <= width
    labels = next(line for line in lines if "reward" in line and "entropy" in line)
    rows = [line for line in lines if re.match(r" *[12]/2 ", line)]
    assert len(rows) == 2
    for label, value in (("KL", "1.2e-05"), ("gnorm", "12.3"), ("lr", "1.0e-06"), ("len", "214"), ("tok/s", "31.2k")):
        end = re.search(rf"{label}(?= )", labels).end()  # type: ignore[union-attr]
        assert rows[0][:end].endswith(value)
    assert not any("…" in row for row in rows)


def test_a_wide_screen_has_every_phase_and_a_narrow_one_the_longest() -> None:
    wide = [line for line in run(160, terminal=False) if "|" in line and "megatron" not in line]
    assert wide[0].split("|")[1].split() == ["old", "weight"]
    assert wide[1].split("|")[1].split() == ["seconds", "rollout", "reward", "log-probs", "train", "sync"]
    assert wide[2].split("|")[1].split() == ["12.8", "8.0", "0.1", "0.5", "3.6", "0.5"]
    narrow = [line for line in run(100, terminal=False) if "|" in line and "megatron" not in line]
    assert narrow[0].split("|")[1].split() == ["seconds", "rollout", "train", "rest"]
    assert narrow[1].split("|")[1].split() == ["12.8", "8.0", "3.6", "1.1"]


def test_the_seconds_of_a_step_are_those_that_passed_though_phases_went_on_at_once() -> None:
    table = StepTable(TRAIN_COLUMNS, n_steps=1, width=160)
    table.header(METRICS, SECONDS)
    row = table.row(1, {**METRICS, "seconds/step": 9.0}, {**SECONDS, "generation": 8.0})
    assert row.split("|")[1].split() == ["9.0", "8.0", "0.1", "0.5", "3.6", "0.5"]


@pytest.mark.parametrize("columns", [TRAIN_COLUMNS, SFT_COLUMNS, PAIR_COLUMNS])
@pytest.mark.parametrize("value", [-1e12, -12345.6, -123.456, -1.23456e-5, 9999.96, 12345.678, 3.4e38])
def test_numbers_of_any_size_stay_in_their_columns(columns: tuple[Column, ...], value: float) -> None:
    table = StepTable(columns, n_steps=1, width=160)
    # The narrow columns are those of shares and counts.
    metrics = {key: value for column in columns if column.width > 5 for key in column.keys}
    assert len(table.header(metrics, {"train": 1.0})[-1]) == len(table.row(1, metrics, {"train": 1.0}))


def test_missing_and_non_finite_values_are_dashes() -> None:
    table = StepTable(TRAIN_COLUMNS, n_steps=50, width=160)
    table.header(METRICS, {"rollout": 1.0})
    row = table.row(3, {"reward/mean": math.nan, "entropy": math.inf, "accuracy": None, "lr": 1e-6}, {})
    assert row.split() == ["3/50", "-", "-", "-", "-", "-", "-", "1.0e-06", "-", "-", "|", "0.0", "-"]


def test_kl_to_the_reference_is_shown_if_there_is_one() -> None:
    table = StepTable(TRAIN_COLUMNS, n_steps=1, width=160)
    table.header({}, {})
    row = table.row(1, {"kl_ref": 0.5, "ppo_kl_k3": 0.25}, {})
    assert "0.500" in row
    assert "0.250" not in row


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (0.31249, "fixed", "0.312"),
        (-0.31249, "fixed", "-0.312"),
        (-1e-7, "fixed", "0.000"),
        (0.0, "short", "0"),
        (12.345, "short", "12.3"),
        (123.45, "short", "123"),
        (1234.5, "short", "1.2e+03"),
        (0.5, "short", "0.500"),
        (0.00123, "short", "0.00123"),
        (-0.00123, "short", "-0.0012"),
        (1.234e-5, "short", "1.2e-05"),
        (-1.234e-5, "short", "-1e-05"),
        (-1234.5, "short", "-1e+03"),
        (-1234.5678, "fixed", "-1234.6"),
        (12345678.9, "fixed", "1.2e+07"),
        (214.0, "count", "214"),
        (21.5, "count", "21.5"),
        (9999.0, "count", "9999"),
        (31234.0, "count", "31.2k"),
        (312345.0, "count", "312k"),
        (12345678.0, "count", "12.3M"),
        (None, "count", "-"),
    ],
)
def test_numbers_are_formatted_by_their_kind(value: float | None, kind: str, text: str) -> None:
    assert number(value, kind) == text  # type: ignore[arg-type]


def test_labels_are_repeated_in_a_long_run() -> None:
    lines = run(160, terminal=False, steps=HEADER_EVERY + 1)
    assert sum("entropy" in line for line in lines) == 2


def test_a_metric_that_comes_later_gets_its_column() -> None:
    console, out = screen(160, terminal=False)
    console.start(n_steps=4)
    for step, memory in ((1, {}), (2, {}), (3, {"peak_memory_gb/max": 61.0}), (4, {})):  # a critic warms up first
        console.step(step, {**METRICS, **memory}, SECONDS)
    lines = [line for line in out.getvalue().splitlines() if "old" not in line]
    assert ["GB" in line for line in lines] == [False, False, False, True, False, False]


def test_a_file_gets_no_colour_no_box_and_no_status_line() -> None:
    timers = PhaseTimers()
    console, out = screen(160, terminal=False, timers=timers)
    with console:
        console.banner("title", {"model": "m"})
        console.start(3)
        with timers.phase("rollout"):
            console.step(1, METRICS, SECONDS)
        console.end("done", {"weights": "w"})
    text = out.getvalue()
    assert "\x1b" not in text
    assert "╭" not in text
    assert "elapsed" not in text
    assert text.startswith("title\n  model  m\n")


def test_a_fact_of_several_lines_stays_in_its_column() -> None:
    console, out = screen(100, terminal=False)
    console.banner("a run", {"model": "tiny-moe", "changed": "seed: 1 -> 2\nactor.optimizer.lr: 1e-06 -> 2e-06"})
    assert out.getvalue().splitlines() == [
        "a run",
        "  model    tiny-moe",
        "  changed  seed: 1 -> 2",
        "           actor.optimizer.lr: 1e-06 -> 2e-06",
    ]


def test_a_terminal_has_a_status_line_with_step_phase_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 7.0)
    timers = PhaseTimers()
    console, out = screen(120, terminal=True, timers=timers)
    with console:
        console.start(n_steps=4)
        console.step(1, METRICS, SECONDS)
        with timers.phase("rollout"):
            assert console._live is not None
            console._live.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert re.search(r"step 2/4   rollout   0\.0 s   elapsed 0:00   about 0:00 left, by the first step", text)


def test_the_time_left_is_told_from_the_first_step_on_and_by_later_steps_as_soon_as_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    timers = PhaseTimers()
    console, out = screen(160, terminal=True, timers=timers)

    def shown(seconds: float) -> str:
        clock[0] += seconds
        assert console._live is not None
        out.truncate(0)
        console._live.refresh()
        return re.sub(r".*elapsed", "elapsed", out.getvalue().replace("\n", " "))

    with console:
        console.start(n_steps=10, done=4)
        with timers.phase("evaluation"):
            assert "left" not in shown(100)
        with timers.phase("rollout"):
            clock[0] += 60
        console.step(5, METRICS, SECONDS)
        assert "about 5:00 left, by the first step" in shown(0)
        clock[0] += 20
        console.step(6, METRICS, SECONDS)
        assert re.search(r"about 1:20 left(?!, by)", shown(0))
        assert "about 1:15 left" in shown(5)
        assert "about 0:00 left" in shown(500)


def test_a_step_before_start_is_a_runtime_error() -> None:
    console, _ = screen(100, terminal=False)
    with pytest.raises(RuntimeError, match=r"before RunConsole\.start"):
        console.step(1, {}, {})


def test_all_phases_fit_beside_the_columns_of_sft() -> None:
    table = StepTable(SFT_COLUMNS, n_steps=10, width=100)
    header = table.header(METRICS, SECONDS)
    assert max(map(len, header)) <= 100
    assert "rest" not in header[-1]


def test_on_80_columns_metrics_give_way_to_the_longest_phases() -> None:
    lines = [line for line in run(80, terminal=True) if "|" in line and "megatron" not in line]
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["step", "reward", "acc", "KL", "gnorm", "len", "tok/s", "|", *NARROW]
    assert lines[1].split("|")[1].split() == ["12.8", "8.0", "3.6", "1.1"]


def test_memory_is_shown_where_it_is_measured() -> None:
    table = StepTable(TRAIN_COLUMNS, n_steps=1, width=160)
    assert "GB" not in table.header(METRICS, SECONDS)[-1]
    measured = {**METRICS, "peak_memory_gb/max": 110.5}
    assert "GB" in table.header(measured, SECONDS)[-1]
    assert " 110 " in table.row(1, measured, SECONDS)


def test_samples_are_cut_in_their_middle_and_stay_on_one_line() -> None:
    console, out = screen(60, terminal=False)
    console.samples(3, [(0.5, "What is\n 1 + 1?", "well " * 30 + "= 2")])
    reward, prompt, response = out.getvalue().splitlines()
    assert "step 3, reward 0.500" in reward
    assert prompt.split(maxsplit=1)[1] == "What is 1 + 1?"
    assert len(response) <= 60
    assert response.split()[0] == "response"
    assert " ... " in response
    assert response.endswith("= 2")


def test_samples_cannot_move_the_cursor_of_a_terminal() -> None:
    console, out = screen(80, terminal=True)
    console.samples(3, [(0.5, "clear \x1b[2J\x9b2J", "\x07half \ud83d, whole 😀, سلام\u200cها")])
    shown = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())  # colours
    assert r"prompt    clear \x1b[2J\x9b2J" in shown
    assert r"response  \x07half \ud83d, whole 😀, سلام" + "\u200cها" in shown
    assert "\x1b" not in shown


def test_the_best_and_the_worst_sample_are_shown_every_few_steps() -> None:
    def sample(reward: float) -> Sample:
        return Sample(Prompt(0, "p", (1,), None), "r", "stop", 2, 1, (0, 0), {"math": reward})

    samples = [sample(reward) for reward in (0.5, 1.0, -1.0, 1.0)]
    assert extremes(samples) == [samples[1], samples[2]]
    assert extremes(samples[:1] * 3) == samples[:1]
    assert [step for step in range(1, 10) if are_shown(step, every=4)] == [1, 4, 8]
    assert not are_shown(1, every=None)


def test_piped_lines_are_as_wide_as_the_users_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    assert RunConsole(TRAIN_COLUMNS, PhaseTimers()).console.width == 90
    monkeypatch.delenv("COLUMNS")
    for stream in ("stderr", "stdin"):
        monkeypatch.setattr(f"sys.{stream}", io.StringIO())
    assert RunConsole(TRAIN_COLUMNS, PhaseTimers()).console.width == FILE_WIDTH


def test_durations_are_written_as_a_clock_shows_them() -> None:
    assert [clock(seconds) for seconds in (0, 59.6, 65, 3665)] == ["0:00", "1:00", "1:05", "1:01:05"]


def test_the_best_step_may_be_one_before_the_run_was_interrupted() -> None:
    console, out = screen(100, terminal=False)
    console.start(n_steps=4, done=2, earlier=[{"step": 1, "accuracy": 0.75}, {"step": 2, "accuracy": 0.25}])
    console.step(3, METRICS, SECONDS)
    console.end("done", {})
    assert "best step  1, training accuracy 0.750" in out.getvalue()


def test_of_a_metric_that_one_step_has_there_is_no_best() -> None:
    """Held-out pairs are evaluated after the last step alone, whatever the step before was."""
    console, out = screen(100, terminal=False)
    console.start(n_steps=2)
    console.step(1, METRICS | {"accuracy": 0.75}, SECONDS)
    console.step(2, METRICS | {"accuracy": 0.25, "eval/accuracy": 0.0}, SECONDS)
    console.end("done", {})
    assert "best step  1, training accuracy 0.750" in out.getvalue()


def test_an_accuracy_that_is_always_0_names_no_best_step() -> None:
    """As with the scores of a reward model, which need not reach 1."""
    console, out = screen(100, terminal=False)
    console.start(n_steps=2)
    for step, reward in ((1, -0.2), (2, 0.4)):
        console.step(step, METRICS | {"accuracy": 0.0, "reward/mean": reward}, SECONDS)
    console.end("done", {})
    assert "best step  2, training reward 0.400" in out.getvalue()
