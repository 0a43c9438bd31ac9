"""The log of samples: lines at once, columns with the values of tokens in parts of whole steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from fivefold.observe import sample_parts, step_log
from fivefold.observe.sample_parts import TokenValues, cut_back_parts, parts_of, read_part
from fivefold.observe.step_log import SampleLog


def record(step: int, response: str = "5", **more: object) -> dict[str, object]:
    truth = {"ground_truth": {"inputs": ["1"]}}
    return {
        "step": step,
        "prompt": "2+3=",
        "response": response,
        "reward": 1.0,
        "finish_reason": "stop",
        **truth,
        **more,
    }


def values(*logprobs: float) -> TokenValues:
    array = np.array(logprobs, np.float32)
    return TokenValues(["t"] * len(logprobs), array, None, -array, np.full(len(logprobs), 7, np.int32))


def steps(folder: Path) -> list[int]:
    return [row["step"] for path, *_ in parts_of(folder) for row in read_part(path)]


def test_samples_are_lines_before_the_update_and_columns_behind_it(tmp_path: Path) -> None:
    lines, parts = tmp_path / "samples.jsonl", tmp_path / "samples"
    with SampleLog(lines, parts) as log:
        log.write([record(1), record(1, "half \ud83d a pair", **{"reward/right": 1.0})])
        assert lines.read_text().count("\n") == 2
        between = [{"at": 1, "text": "half \ud83d"}]
        log.complete([replace(values(-0.5, float("nan")), reads=between), values(-1.0)])
        assert not parts.exists()
        log.sync()
        log.write([record(2)])
    [first, second] = [read_part(path) for path, *_ in parts_of(parts)]
    assert first[0]["rollout_logprobs"][0] == -0.5
    assert np.isnan(first[0]["rollout_logprobs"][1])
    assert first[0]["ground_truth"] == '{"inputs": ["1"]}'
    assert first[1]["rewards"] == {"right": 1.0}
    assert first[1]["response"] == "half \\ud83d a pair"
    assert first[1]["advantages"] == [1.0]
    assert first[0]["versions"] == [7, 7]
    assert [row["reads"] for row in first] == [[{"at": 1, "text": "half \\ud83d"}], []]
    # The update of step 2 failed, and its samples are there nevertheless.
    assert (second[0]["step"], second[0]["tokens"]) == (2, None)


def test_a_part_without_a_column_is_read_without_it(tmp_path: Path) -> None:
    part = tmp_path / "steps-000001-000001.parquet"
    sample_parts.write_part(part, [{**record(1), "ground_truth": "5", "rewards": {}}])
    pyarrow.parquet.write_table(pyarrow.parquet.read_table(part).drop_columns(["versions"]), part)
    assert read_part(part, ("step", "versions")) == [{"step": 1}]


def test_many_samples_make_a_part_before_a_checkpoint_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_log, "MOST_ROWS", 4)
    with SampleLog(tmp_path / "samples.jsonl", tmp_path / "samples") as log:
        for step in range(1, 6):
            log.write([record(step), record(step)])
            log.complete()
    assert [part[1:] for part in parts_of(tmp_path / "samples")] == [(1, 2), (3, 4), (5, 5)]


@pytest.mark.parametrize("step", [0, 2, 3, 6])
def test_a_run_that_goes_on_cuts_the_columns_back_to_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(step_log, "MOST_ROWS", 4)
    with SampleLog(tmp_path / "samples.jsonl", tmp_path / "samples") as log:
        for each in range(1, 7):
            log.write([record(each), record(each)])
            log.complete([values(-1.0), values(-2.0)])
    cut_back_parts(tmp_path / "samples", step)
    assert steps(tmp_path / "samples") == [each for each in range(1, step + 1) for _ in range(2)]
