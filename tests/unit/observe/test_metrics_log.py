from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fivefold.observe.jsonl import JsonLines, write_json
from fivefold.observe.metrics import MetricsLog


def strict(text: str) -> object:
    """Parse JSON by the standard, which has no NaN and no Infinity."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def test_a_step_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard") as log:
        log.write(1, {"reward/mean": 0.5, "grad_norm": math.nan})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [strict(line) for line in lines] == [{"step": 1, "reward/mean": 0.5, "grad_norm": None}]
        log.write(2, {"reward/mean": 0.75, "grad_norm": math.inf})

        board = EventAccumulator(str(tmp_path / "tensorboard"))
        board.Reload()
        rewards = [(event.step, event.value) for event in board.Scalars("reward/mean")]
        assert rewards == [(1, 0.5), (2, 0.75)]


def test_without_tensorboard_only_the_json_lines_are_written(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl", None) as log:
        log.write(1, {"loss": 1.0})
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_samples_keep_their_characters_and_non_finite_numbers_become_null(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "samples.jsonl") as lines:
        lines.write({"prompt": "π = ?\n", "logprobs": [-0.5, -math.inf], "deep": {"x": (math.nan, 1)}})
    text = (tmp_path / "samples.jsonl").read_text(encoding="utf-8")
    assert "π" in text
    assert text.count("\n") == 1
    assert strict(text) == {"prompt": "π = ?\n", "logprobs": [-0.5, None], "deep": {"x": [None, 1]}}


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
