"""How far something is: what a process counts, what earlier starts tell, and what the status line makes of both."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from fivefold.config.schema.train import TrainRecipe
from fivefold.observe.earlier import build_seconds
from fivefold.observe.progress import Progress, counting, current_progress
from fivefold.observe.run_dir import RunDir
from fivefold.observe.status_line import StatusLine
from fivefold.observe.timers import PhaseTimers


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_the_time_left_follows_from_what_is_done(clock: list[float]) -> None:
    with counting("outer"), counting("loading weights", 200) as count:
        count(1)
        clock[0] = 5
        assert current_progress() == Progress("loading weights", 1, 200, 5.0)
        assert current_progress().seconds_left is None  # type: ignore[union-attr]
        count(49)
        assert current_progress().seconds_left == pytest.approx(15)  # type: ignore[union-attr]
    assert current_progress() is None


def test_the_status_line_tells_what_the_process_counts(clock: list[float]) -> None:
    timers = PhaseTimers()
    line = StatusLine(timers)
    line.pace.begin(n_steps=10, done=2)
    with timers.phase("evaluation"), counting("generating", 64) as count:
        clock[0] = 4
        count(16)
        assert line.text(80) == "step 3/10   evaluation 25%   4.0 s, about 0:12 left   elapsed 0:04"
    with timers.phase("save"):
        pass
    assert line.text(80) == "step 3/10   elapsed 0:04"
    with timers.phase("evaluation"):
        clock[0] += 1
        assert line.text(80) == "step 3/10   evaluation   1.0 s, about 0:03 left   elapsed 0:05"


def test_the_status_line_tells_of_the_role_that_needs_longest(clock: list[float]) -> None:
    reports = {"actor": Progress("loading weights", 30, 40, 30.0), "rollout": Progress("starting the server", 0, 0, 20)}
    line = StatusLine(PhaseTimers())
    line.follow(lambda: reports, {"rollout": 95.0})
    clock[0] = 31
    assert line.text(80) == "setup, rollout starting the server   31.0 s, about 1:15 left"
    del reports["rollout"]
    assert line.text(80) == "setup, actor loading weights 75%   31.0 s, about 0:10 left"


def write_start(run: RunDir, logs: Path, seconds: float) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    events = [{"name": "build", "start": 1.0, "seconds": seconds, "thread": 0}, {"name": "build", "seconds": 1.0}]
    (logs / "rollout-0.events").write_text("".join(json.dumps(event) + "\n" for event in events))
    (logs / "actor-0.events").write_text('{"name": "bui')


def test_the_last_start_with_the_same_models_tells_how_long_a_server_starts(tmp_path: Path) -> None:
    def recipe(trial: str, model: str) -> TrainRecipe:
        return TrainRecipe.model_validate(
            {
                "experiment_name": "e",
                "trial_name": trial,
                "cluster": {"fileroot": str(tmp_path)},
                "actor": {"path": model},
                "train_dataset": {"path": "package:arithmetic/train", "batch_size": 4},
            }
        )

    other = RunDir.create(recipe("other", "package:tiny-moe"), overwrite=False)
    write_start(other, other.logs, 42.0)
    larger = RunDir.create(recipe("larger", "a/larger"), overwrite=False)
    write_start(larger, larger.logs, 420.0)
    # What is wrong with other trials is no matter of this one.
    (tmp_path / "e" / "latest").symlink_to("deleted")
    broken = RunDir.create(recipe("broken", "package:tiny-moe"), overwrite=False)
    broken.recipe.write_bytes(bytes(64))
    run = RunDir.create(recipe("this", "package:tiny-moe"), overwrite=False)
    assert build_seconds(run.path) == {"rollout": 42.0}
    assert build_seconds(larger.path) == {}
    write_start(run, run.logs / "start-1", 12.0)
    assert build_seconds(run.path) == {"rollout": 12.0}
