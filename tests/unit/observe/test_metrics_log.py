from __future__ import annotations

import errno
import json
import math
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from fivefold.observe.json_records import cut_back, write_json
from fivefold.observe.jsonl import JsonLines
from fivefold.observe.step_log import MetricsLog


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


@pytest.mark.parametrize("call", ["flush", "close"])
def test_an_error_of_tensorboard_names_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(board: SummaryWriter) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SummaryWriter, call, full)
    with (
        pytest.raises(OSError, match=r"No space left on device: '.*/tensorboard'"),
        MetricsLog(tmp_path / "metrics.jsonl", tmp_path / "tensorboard") as log,
    ):
        log.write(1, {"loss": 1.0})


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


def scalars(folder: Path) -> list[tuple[int, float]]:
    """Return the steps and values of the metric `x`, as TensorBoard shows them."""
    board = EventAccumulator(str(folder))
    board.Reload()
    return [(event.step, event.value) for event in board.Scalars("x")]


@pytest.mark.parametrize("torn", [False, True])
def test_a_log_that_goes_on_has_no_gap_and_no_step_twice(tmp_path: Path, torn: bool) -> None:
    path, board = tmp_path / "metrics.jsonl", tmp_path / "tensorboard"
    last = 0
    for first_step, end in ((1, 8), (5, 7), (6, 12)):
        cut_back(path, first_step - 1)
        with MetricsLog(path, board, first_step=first_step) as log:
            for step in range(first_step, end):
                log.write(step, {"x": float(step + last)})
            log.sync()
        last = 100 * end
        if torn:
            newest = max(board.iterdir(), key=lambda file: file.stat().st_mtime_ns)
            newest.write_bytes(newest.read_bytes()[:-3])
            path.write_bytes(path.read_bytes()[:-3])
        time.sleep(1.1)  # the names of event files have whole seconds, and TensorBoard reads them in their order
    lines = path.read_text().splitlines()
    written = [(line["step"], line["x"]) for line in map(json.loads, lines[:-1] if torn else lines)]
    assert scalars(board) == written
    assert [step for step, _ in written] == list(range(1, 11 if torn else 12))
    assert [value - step for step, value in written][:6] == [0, 0, 0, 0, 800, 700]


@pytest.mark.parametrize(
    "rest", [b'{"step": 3, "x": 0.', b"\0\0\0\0\0", b"\xff\xfe\n", b'{"x": 1}\n', b"[3]\n", b"\n", b'{"step": "3"}\n']
)
def test_lines_that_are_not_whole_are_cut(tmp_path: Path, rest: bytes) -> None:
    path = tmp_path / "samples.jsonl"
    whole = '{"step": 1, "text": "π\u2028"}\n{"step": 2}\n{"step": 2}\n'.encode()
    path.write_bytes(whole + b'{"step": 4}\n' + rest)
    cut_back(path, 3)
    assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]


def test_a_log_that_does_not_exist_is_not_created_by_cutting(tmp_path: Path) -> None:
    cut_back(tmp_path / "samples.jsonl", 3)
    assert list(tmp_path.iterdir()) == []
