"""Runs that are killed or asked to end, and go on when the same command is run again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fivefold.checkpoints.store import CheckpointStore
from tests.e2e.conftest import COMMAND, ROOT, Fivefold

N_STEPS = 4
TRAIN = (
    "train", str(ROOT / "recipes" / "quickstart.yaml"), f"total_train_steps={N_STEPS}", "train_dataset.batch_size=8",
    "gconfig.n_samples=4", "valid_dataset.limit=16", "recover.freq_steps=1", "stats.n_logged_samples=32",
    "saver.freq_steps=3",
)  # fmt: skip
SFT = (
    "sft", str(ROOT / "recipes" / "tiny-moe-sft.yaml"), f"total_train_steps={N_STEPS}", "train_dataset.batch_size=8",
    "valid_dataset=null", "recover.freq_steps=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs of this module."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def undisturbed(folder: Path, fivefold: Fivefold) -> Path:
    """A run that was not interrupted."""
    result = fivefold(*TRAIN, f"cluster.fileroot={folder}", "trial_name=undisturbed")
    assert result.returncode == 0, result.stderr + result.stdout
    return folder / "quickstart" / "undisturbed"


def interrupted(run: Path, arguments: tuple[str, ...], end: Callable[[subprocess.Popen[str]], None]) -> tuple[int, str]:
    """Start a command, call `end` as soon as its first checkpoint is complete; return exit code and error output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*COMMAND, *arguments, f"cluster.fileroot={run.parents[1]}", f"trial_name={run.name}"]
    # In a process group of its own, as a shell starts it: a terminal sends Ctrl-C to all processes of the group.
    driver = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while not CheckpointStore(run / "checkpoints").all():
        if driver.poll() is not None or time.monotonic() > deadline:
            driver.kill()
            pytest.fail(f"the run wrote no checkpoint: {driver.communicate()}")
        time.sleep(0.01)
    end(driver)
    _, errors = driver.communicate(timeout=60)
    return driver.returncode, errors


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of all steps, without those that measure time."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not is_time(key)} for line in lines]


def is_time(metric: str) -> bool:
    return any(word in metric for word in ("seconds/", "per_second", "tflops", "replica_busy"))


def assert_the_same(run: Path, other: Path) -> None:
    """Compare the metrics, the samples and the bytes of the weights of two runs."""
    assert [row["step"] for row in rows(run)] == list(range(1, N_STEPS + 1))
    assert rows(run) == rows(other)
    for file in ("samples.jsonl", "weights/model.safetensors"):
        if (other / file).exists():
            assert (run / file).read_bytes() == (other / file).read_bytes(), file


def test_a_killed_run_goes_on_with_the_same_bits(undisturbed: Path, fivefold: Fivefold) -> None:
    run = undisturbed.with_name("killed")
    code, _ = interrupted(run, TRAIN, subprocess.Popen.kill)
    assert code == -signal.SIGKILL
    result = fivefold(*TRAIN, f"cluster.fileroot={run.parents[1]}", f"trial_name={run.name}")
    assert result.returncode == 0, result.stderr + result.stdout
    assert "goes on" in result.stdout
    assert_the_same(run, undisturbed)
    first, second = (json.loads((path / "summary.json").read_text()) for path in (run, undisturbed))
    assert [first[key] for key in ("accuracy_before", "accuracy_after", "steps")] == [
        second[key] for key in ("accuracy_before", "accuracy_after", "steps")
    ]
    board = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("reward/mean")] == list(range(1, N_STEPS + 1))


def test_ctrl_c_ends_after_the_step_and_another_layout_goes_on(undisturbed: Path, fivefold: Fivefold) -> None:
    run = undisturbed.with_name("asked")
    code, errors = interrupted(run, TRAIN, lambda driver: os.killpg(driver.pid, signal.SIGINT))
    assert code == 130, errors
    assert "the run saves and ends after this step" in errors
    assert f"trial_name={run.name}" in errors, "the command that goes on"
    done = len(rows(run))
    assert CheckpointStore(run / "checkpoints").all()[-1].step == done
    assert rows(run) == rows(undisturbed)[:done]
    changed = (f"cluster.fileroot={run.parents[1]}", f"trial_name={run.name}", "actor.backend=megatron:d1")
    result = fivefold(*TRAIN, *changed, "train_dataset.limit=500")
    assert result.returncode == 2
    assert "train_dataset.limit" in result.stderr
    result = fivefold(*TRAIN, *changed)
    assert result.returncode == 0, result.stderr + result.stdout
    assert "actor.backend" in result.stdout
    assert [row["step"] for row in rows(run)] == list(range(1, N_STEPS + 1))
    for row, other in zip(rows(run), rows(undisturbed), strict=True):
        assert row["reward/mean"] == pytest.approx(other["reward/mean"], abs=0.1)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.2)


def test_a_finished_run_says_so_and_stays_as_it_is(undisturbed: Path, fivefold: Fivefold) -> None:
    before = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")}
    result = fivefold(*TRAIN, f"cluster.fileroot={undisturbed.parents[1]}", f"trial_name={undisturbed.name}")
    assert result.returncode == 0, result.stderr
    assert "finished" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")} == before


def test_supervised_fine_tuning_goes_on_with_the_same_bits(folder: Path, fivefold: Fivefold) -> None:
    examples = folder / "examples.jsonl"
    lines = [json.dumps({"prompt": f"{a}+{b}=", "response": str(a + b)}) for a in range(8) for b in range(8)]
    examples.write_text("\n".join(lines))
    command = (*SFT, f"train_dataset.path={examples}", f"cluster.fileroot={folder}")
    whole = folder / "tiny-moe-sft" / "undisturbed"
    result = fivefold(*command, f"trial_name={whole.name}")
    assert result.returncode == 0, result.stderr + result.stdout
    run = whole.with_name("killed")
    interrupted(run, command, subprocess.Popen.kill)
    result = fivefold(*command, f"trial_name={run.name}")
    assert result.returncode == 0, result.stderr + result.stdout
    assert_the_same(run, whole)
