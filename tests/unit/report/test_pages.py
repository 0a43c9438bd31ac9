"""What a report holds, taken apart again and compared with the run's files."""

from __future__ import annotations

import base64
import gzip
import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.cli.size import size
from fivefold.observe.held_out import HeldOut
from fivefold.observe.json_records import write_json
from fivefold.observe.sample_parts import parts_of, read_part
from fivefold.observe.timers import TimeLeft
from fivefold.report import page as page_module
from fivefold.report.listing import find_runs
from fivefold.report.page import page, state
from fivefold.report.recipe_table import NO_DEFAULT, with_defaults
from fivefold.report.run import Run, duration
from fivefold.report.series import Series
from tests.e2e.documents import DOCS, blocks
from tests.unit.report.made_runs import lines_of, make_run, set_state


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def content(run: Path) -> str:
    return page([Run.read(run)])


def facts_of(content: str) -> dict[str, Any]:
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', content, re.DOTALL)
    return json.loads(text)


def block_of(content: str, name: str) -> bytes:
    [text] = re.findall(rf'data-block="{name}">(.*?)</script>', content)
    return gzip.decompress(base64.b64decode(text))


def table_of(block: bytes) -> dict[str, np.ndarray]:
    (size,) = struct.unpack("<I", block[:4])
    header = json.loads(block[4 : 4 + size])
    values = np.frombuffer(block, "<f4", offset=4 + size).reshape(len(header["names"]), header["n"])
    return dict(zip(header["names"], values, strict=True))


def test_a_report_holds_every_metric_of_every_step(run: Path, content: str) -> None:
    table = table_of(block_of(content, "0-metrics"))
    for row, record in enumerate(lines_of(run / "metrics.jsonl")):
        for name, values in table.items():
            wanted = record.get(name)
            assert np.isnan(values[row]) if wanted is None else values[row] == np.float32(wanted), (name, row)


def test_a_report_holds_every_logged_sample_with_its_tokens(run: Path, content: str) -> None:
    index = table_of(block_of(content, "0-samples-index"))
    chunks = [json.loads(block_of(content, f"0-samples-chunk-{number}")) for number in range(2)]
    shown = [sample for chunk in chunks for sample in chunk]
    records = lines_of(run / "samples.jsonl")
    assert len(shown) == len(records) == 96
    for sample, record in zip(shown, records, strict=True):
        assert {name: sample[name] for name in ("prompt", "response", "ground_truth")} == {
            name: record[name] for name in ("prompt", "response", "ground_truth")
        }
        assert len(sample["tokens"]) == len(sample["trainer_logprobs"]) == len(sample["advantages"]) == 12
    assert index["reward"].tolist() == [record["reward"] for record in records]
    assert index["reward/brief"].tolist() == [-0.5] * 96
    assert index["age"].tolist() == [record["step"] - 1 - record["oldest_weight_version"] for record in records]
    # Only samples that several versions have written have versions by token.
    mixed = {place: sample["versions"] for place, sample in enumerate(shown) if "versions" in sample}
    assert set(mixed) == {place for place, age in enumerate(index["age"]) if age > 0} != set()
    assert mixed[8 * 11 + 1] == [9] * 6 + [11] * 6
    assert index["prompt"].tolist() == [record["prompt_index"] for record in records]
    assert facts_of(content)["runs"][0]["samples"] == {"n": 96, "unit": "tokens", "note": ""}


def test_a_report_loads_nothing_and_runs_nothing_that_a_run_wrote(content: str) -> None:
    assert "alert(1)" not in content.replace("\\u003cscript>alert(1)", "")
    assert "<b>two</b>" not in content
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", content)
    assert "connect-src 'none'" in content


def test_texts_that_are_not_whole_are_shown_as_far_as_they_are(tmp_path: Path) -> None:
    run = make_run(tmp_path, n_steps=1)
    about = json.loads((run / "about.json").read_text())
    write_json(run / "about.json", about | {"command": "fivefold train caf\udce9.yaml"})
    with (run / "samples.jsonl").open("ab") as lines:
        lines.write(b'{"step": 2, "prompt": "\0\0\0{"step": 2}\n')
    out = tmp_path / "report.html"
    result = CliRunner().invoke(app, ["report", str(run), "-o", str(out)])
    assert result.exit_code == 0, result.output
    [facts] = facts_of(out.read_text())["runs"]
    assert facts["command"] == "fivefold train caf\udce9.yaml"
    assert facts["samples"]["n"] == 8
    assert facts["headline"].startswith("finished 1 step in")


def test_a_part_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, n_steps=1)
    [(part, *_)] = parts_of(run / "samples")
    part.write_bytes(b"PAR1")
    result = CliRunner().invoke(app, ["report", str(run)])
    assert result.exit_code == 2
    assert f"{part} cannot be read" in result.output


def test_a_report_with_little_room_says_what_it_leaves_out(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "ROOM_FOR_SAMPLES", 9000)
    content = page([Run.read(run)])
    note = facts_of(content)["runs"][0]["samples"]["note"]
    assert re.fullmatch(r"(\d+) of 96 samples have the values .* `fivefold watch` shows all of them\.", note)
    monkeypatch.setattr(page_module, "ROOM_FOR_SAMPLES", 1500)
    content = page([Run.read(run)])
    note = facts_of(content)["runs"][0]["samples"]["note"]
    kept = int(re.fullmatch(r"(\d+) of 96 logged samples are in this page, from \d+ steps; .*", note)[1])  # type: ignore[index]
    index = table_of(block_of(content, "0-samples-index"))
    assert len(index["step"]) == kept < 96
    assert index["step"][-1] == 12


def test_the_parts_hold_what_the_lines_hold(run: Path) -> None:
    rows = [row for path, *_ in parts_of(run / "samples") for row in read_part(path)]
    for row, record in zip(rows, lines_of(run / "samples.jsonl"), strict=True):
        assert row["rewards"] == {"right": record["reward/right"], "brief": record["reward/brief"]}
        assert {name: row[name] for name in ("step", "prompt", "response")} == {
            name: record[name] for name in ("step", "prompt", "response")
        }


def test_the_recipe_is_compared_with_the_defaults_of_the_schema(content: str) -> None:
    rows = {key: (value, default) for key, value, default in facts_of(content)["runs"][0]["recipe"]}
    assert rows["actor.path"] == ("package:tiny-moe", NO_DEFAULT)
    assert rows["train_dataset.batch_size"][0] == 4
    assert rows["actor.optimizer.lr"][0] == rows["actor.optimizer.lr"][1]
    other = {key: default for key, _, default in with_defaults({"actor": {"path": "m"}, "gconfig": {"none_such": 1}})}
    assert other["gconfig.none_such"] == "(not a key of this version)"


def test_runs_are_listed_with_the_command_that_goes_on(run: Path, tmp_path: Path) -> None:
    make_run(tmp_path, "trial-1", n_steps=3)
    set_state(make_run(tmp_path, "trial-2", n_steps=5), "interrupted")
    [second, first], _ = find_runs(tmp_path)
    if first.name != "made/trial-1":  # both may have begun in the same second
        first, second = second, first
    assert (first.step, first.state, second.state) == (3, "finished", "interrupted")
    for width in ("80", "160"):
        shown = CliRunner().invoke(app, ["runs", str(tmp_path)], env={"COLUMNS": width}).output
        assert "To resume made/trial-2: fivefold train made.yaml trial_name=trial-2" in shown
        assert "To resume made/trial-1" not in shown
        assert "…" not in shown
    lines = CliRunner().invoke(app, ["runs", str(tmp_path), "--json"]).output.splitlines()
    found = {Path(facts["folder"]).name: facts for facts in map(json.loads, lines)}
    assert found["trial-1"]["best"]["value"] == pytest.approx(1.0)
    assert found["trial-2"]["command"] == "fivefold train made.yaml trial_name=trial-2"
    about = json.loads((tmp_path / "made/trial-2/about.json").read_text())
    write_json(tmp_path / "made/trial-2/about.json", about | {"folder": "/my work"})
    lines = CliRunner().invoke(app, ["runs", str(tmp_path), "--json"]).output
    assert "\"cd '/my work' && fivefold train made.yaml trial_name=trial-2\"" in lines
    assert found["trial-1"]["bytes"] > 1000


def test_only_the_newest_run_that_has_not_finished_has_its_command_in_the_list(tmp_path: Path) -> None:
    for number, ending in enumerate(("failed", "interrupted", "failed", "finished")):
        folder = make_run(tmp_path, f"trial-{number}", n_steps=1)
        set_state(folder, ending)
        status = json.loads((folder / "status.json").read_text())
        write_json(folder / "status.json", status | {"began": f"2030-01-0{number + 1}T00:00:00+00:00"})
    shown = CliRunner().invoke(app, ["runs", str(tmp_path)], env={"COLUMNS": "160"}).output
    assert [line for line in shown.splitlines() if "To resume" in line] == [
        "To resume made/trial-2: fivefold train made.yaml trial_name=trial-2"
    ]
    assert "2 more runs have not finished: --json has each command." in shown
    lines = CliRunner().invoke(app, ["runs", str(tmp_path), "--json"]).output.splitlines()
    assert sum(json.loads(line)["command"] is not None for line in lines) == 3


def test_runs_that_cannot_be_read_hide_no_others(tmp_path: Path) -> None:
    make_run(tmp_path, n_steps=1)
    torn, unclear = (make_run(tmp_path, trial, n_steps=1) for trial in ("trial-1", "trial-2"))
    (torn / "status.json").write_bytes(b"\0" * 64)
    (unclear / "recipe.yaml").write_text("actor: [")
    for options in ((), ("--json",)):
        shown = CliRunner().invoke(app, ["runs", str(tmp_path), *options], env={"COLUMNS": "160"})
        assert shown.exit_code == 0
        assert [name in shown.stdout for name in ("trial-0", "trial-1", "trial-2")] == [True, False, False]
        assert f"left out: {torn} holds a run, but its status.json is damaged" in shown.stderr
        assert f"left out: {unclear}/recipe.yaml" in shown.stderr


def test_the_list_of_runs_tells_the_time_left_of_those_that_go_on(tmp_path: Path) -> None:
    run = make_run(tmp_path, n_steps=4)
    make_run(tmp_path, "trial-1", n_steps=4)
    set_state(run, "running")
    (run / "summary.json").unlink()
    about = json.loads((run / "about.json").read_text())
    write_json(run / "about.json", about | {"steps": 10})
    for width in ("80", "160"):
        header, *_ = rows = CliRunner().invoke(app, ["runs", str(tmp_path)], env={"COLUMNS": width}).output.splitlines()
        assert "left" in header
        assert [("about 36 s" in row) for row in rows[1:]].count(True) == 1
    lines = CliRunner().invoke(app, ["runs", str(tmp_path), "--json"]).output.splitlines()
    left = {Path(facts["folder"]).name: facts["seconds_left"] for facts in map(json.loads, lines)}
    assert left == {"trial-0": pytest.approx(36.0), "trial-1": None}


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, n_steps=1)
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 2
    assert f"name one such as {run}" in result.output


@pytest.mark.parametrize(
    ("seconds", "text"), [(42.2, "42 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (90000, "1 d 1 h")]
)
def test_durations_are_short_texts(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("n_bytes", "text"), [(0, "0 B"), (999.6, "1 kB"), (1300, "1.3 kB"), (999_700, "1 MB"), (1.024e12, "1.024 TB")]
)
def test_sizes_are_short_texts(n_bytes: float, text: str) -> None:
    assert size(n_bytes) == text


def test_the_snippet_of_the_page_reads_the_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "runs").parent.rename(tmp_path / "runs" / "quickstart")
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(DOCS / "observing.md", "python")
    exec(code, {})
    [row, *_] = lines_of(tmp_path / "runs/quickstart/trial-0/samples.jsonl")
    assert capsys.readouterr().out.startswith(f"{row['response']} [-")


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def test_a_run_that_goes_on_tells_the_time_left_from_its_first_step_on(run: Path) -> None:
    read = Run.read(run)
    assert read.time_left is None

    def after(n: int, *names: str) -> Run:
        columns = {name: read.series.columns[name][:n] for name in ("step", *names)}
        return replace(read, state="running", summary={}, series=Series(columns))

    assert after(1, "seconds/step").time_left == TimeLeft(6.0 * 11, by_first_step=True)
    assert after(4, "seconds/step", "seconds/train").time_left == TimeLeft(6.0 * 8, by_first_step=False)
    assert after(0, "seconds/step").time_left is None
    # Runs of other kinds have phases alone.
    phases = after(4, "seconds/rollout", "seconds/train")
    spent = read.series.columns["seconds/rollout"][:4] + read.series.columns["seconds/train"][:4]
    assert phases.time_left == TimeLeft(pytest.approx(spent[1:].mean() * 8, rel=1e-5), by_first_step=False)
    assert phases.seconds == pytest.approx(spent.sum(), rel=1e-5)
    assert state(after(1, "seconds/step"))["left"] == {"time": "1 min 6 s", "doubt": ", by the first step"}


def test_before_training_is_where_a_curve_of_held_out_data_begins(run: Path) -> None:
    read = Run.read(run)
    assert state(read)["held_out"] == {"label": "held-out accuracy", "before": 0.1, "after": 0.9}
    tuned = replace(read, summary={"nll_before": 5.0, "nll_after": 2.0, "steps": 12, "seconds": 90.0})
    assert tuned.headline() == "finished 12 steps in 1 min 30 s: held-out loss 5.000 → 2.000"
    assert tuned.before == {"eval/nll": 5.0}


def test_where_no_answer_ever_counts_as_right_the_headline_tells_the_reward(run: Path) -> None:
    rewards = {"reward_before": -0.06, "reward_after": 0.31}
    never = {"accuracy_before": 0.0, "accuracy_after": 0.0}
    told = replace(Run.read(run), summary=never | rewards).held_out
    assert told == HeldOut("held-out reward", -0.06, 0.31)
    told = replace(Run.read(run), summary=never | {"accuracy_after": 0.5} | rewards).held_out
    assert told == HeldOut("held-out accuracy", 0.0, 0.5)
    # Of rewards that are 0 or 1 neither says more.
    told = replace(Run.read(run), summary=never | {"reward_before": 0.0, "reward_after": 0.0}).held_out
    assert told == HeldOut("held-out accuracy", 0.0, 0.0)
