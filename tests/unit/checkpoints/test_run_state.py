"""The driver's state, when an action is due, and fingerprints."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from fivefold.algorithms.state import AlgorithmState
from fivefold.checkpoints.checkpointer import Schedule
from fivefold.checkpoints.fingerprints import Fingerprints
from fivefold.checkpoints.manifest import DamagedCheckpointError
from fivefold.checkpoints.run_state import MetricHistory, RunState
from fivefold.config.schema.run import PeriodicConfig, RecoverConfig
from tests.unit.checkpoints.examples import run_state


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    state = run_state(
        kept_metric=MetricHistory("loss", {3: 0.1 + 0.2, 12: math.inf}),
        started_from="/runs/other",
        algorithm=AlgorithmState(0.1 + 0.2, corrects_rollout=True),
    )
    state.write(tmp_path)
    assert RunState.read(tmp_path) == state
    plain = run_state(kept_metric=None)
    plain.write(tmp_path)
    assert RunState.read(tmp_path) == plain


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": 1}', "null"])
def test_a_damaged_state_is_refused_with_its_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(DamagedCheckpointError, match=r"run\.json is damaged"):
        RunState.read(tmp_path)


def test_a_missing_state_is_refused_with_its_file(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"run\.json is missing"):
        RunState.read(tmp_path)


def test_the_best_checkpoint_is_the_later_one_of_equals_among_those_there_are() -> None:
    history = MetricHistory("eval/accuracy", {4: 0.5, 8: 0.75}).with_value(12, 0.75).with_value(16, 0.5)
    assert history.best([4, 8, 12, 16, 20]) == 12
    assert history.best([4, 8]) == 8
    assert history.best([20]) is None


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def due(config: PeriodicConfig, steps_per_epoch: int = 10) -> list[int]:
    schedule = Schedule(config, total_steps=25, steps_per_epoch=steps_per_epoch, clock=Clock())
    return [step for step in range(1, 26) if schedule.is_due(step)]


def test_an_action_is_due_by_steps_by_epochs_and_after_the_last_step() -> None:
    assert due(PeriodicConfig()) == [25]
    assert due(PeriodicConfig(freq_steps=8)) == [8, 16, 24, 25]
    assert due(PeriodicConfig(freq_epochs=1)) == [10, 20, 25]
    assert due(PeriodicConfig(freq_epochs=2)) == [20, 25]
    assert due(PeriodicConfig(freq_steps=8, freq_epochs=1)) == [8, 10, 16, 20, 24, 25]


def test_time_counts_from_the_start_and_from_the_last_time() -> None:
    clock = Clock()
    schedule = Schedule(RecoverConfig(freq_secs=60), total_steps=99, steps_per_epoch=99, clock=clock)
    clock.now += 59
    assert not schedule.is_due(1)
    clock.now += 1
    assert schedule.is_due(2)
    assert schedule.is_due(3), "it is due until it is done"
    schedule.done()
    clock.now += 59
    assert not schedule.is_due(4)
    clock.now += 1
    assert schedule.is_due(5)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 8, "transformers_version": "5.1"}')
    (folder / "model.safetensors").write_bytes(bytes(3 * 2**20))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("a model")
    return folder


def fingerprints(model: Path, from_scratch: bool = False) -> Fingerprints:
    return Fingerprints.of(model, model, from_scratch=from_scratch)


def test_a_fingerprint_is_of_the_content_and_not_of_its_form(model: Path) -> None:
    before = fingerprints(model)
    (model / "config.json").write_text(json.dumps({"hidden_size": 8, "model_type": "qwen3", "_name_or_path": "x"}))
    (model / "README.md").write_text("another text")
    moved = model.rename(model.with_name("moved"))
    assert fingerprints(moved) == before


@pytest.mark.parametrize(
    ("file", "content", "differing"),
    [
        ("config.json", b'{"model_type": "qwen3", "hidden_size": 16}', ["config"]),
        ("model.safetensors", b"\1" + bytes(3 * 2**20 - 1), ["weights"]),
        ("model.safetensors", bytes(3 * 2**20 - 1) + b"\1", ["weights"]),
        ("model.safetensors", bytes(3 * 2**20 + 1), ["weights"]),
        ("model-00002.safetensors", b"", ["weights"]),
        ("tokenizer.json", b"{ }", ["tokenizer"]),
        ("chat_template.jinja", b"", ["tokenizer"]),
    ],
)
def test_another_content_has_another_fingerprint(model: Path, file: str, content: bytes, differing: list[str]) -> None:
    before, from_scratch = fingerprints(model), fingerprints(model, from_scratch=True)
    (model / file).write_bytes(content)
    assert before.differing(fingerprints(model)) == differing
    # A model that starts from random weights has none in its folder that matter.
    assert from_scratch.differing(fingerprints(model, from_scratch=True)) == [n for n in differing if n != "weights"]
