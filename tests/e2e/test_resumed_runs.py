"""Runs that are killed or asked to end, and go on when the same command is run again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typer.testing import CliRunner

from fivefold.checkpoints.store import CheckpointStore
from fivefold.cli.main import app
from fivefold.convert.megatron import convert_to_torch_dist
from tests.e2e.conftest import ROOT, Fivefold, cut_back, is_timed
from tests.e2e.held_reward import held_after
from tests.forks import start_forked

N_STEPS = 5
KEEP_ALL = f"recover.max_to_keep={N_STEPS}"
TRAIN = (
    "train", str(ROOT / "recipes" / "quickstart.yaml"), f"total_train_steps={N_STEPS}", "train_dataset.batch_size=8",
    "gconfig.n_samples=4", "valid_dataset.limit=16", "recover.freq_steps=1", "stats.n_logged_samples=32",
    "saver.freq_steps=3", "actor.kl_ctl=0.001", "actor.ppo_n_minibatches=1", "actor.path=mcore",
    "actor.megatron.use_dist_checkpointing=true", "actor.megatron.dist_checkpointing_path=mcore", KEEP_ALL,
    "reward={fn: tests.e2e.held_reward:right, kwargs: {hold: hold}}",
)  # fmt: skip
"""The runs start from a Megatron-Core checkpoint in the folder `mcore`, which has no weights for Hugging Face. The file
`hold` can hold them back."""
SFT = (
    "sft", str(ROOT / "recipes" / "tiny-moe-sft.yaml"), f"total_train_steps={N_STEPS}", "train_dataset.batch_size=8",
    "valid_dataset=null", "recover.freq_steps=1", KEEP_ALL,
)  # fmt: skip

ASKED = "the run saves and ends after this step"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working folder of all runs of this module."""
    folder = tmp_path_factory.mktemp("runs")
    convert_to_torch_dist("package:tiny-moe", folder / "mcore")
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder: Path, fivefold: Fivefold) -> Path:
    """A run that was not interrupted."""
    run = folder / "quickstart" / "undisturbed"
    result = fivefold(*TRAIN, *place(run), cwd=folder)
    assert result.returncode == 0, result.stderr + result.stdout
    return run


def place(run: Path) -> tuple[str, str]:
    """Return the keys of the run in the folder `run`."""
    return f"cluster.fileroot={run.parents[1]}", f"trial_name={run.name}"


def last_step(run: Path) -> int:
    """Return the step of the last checkpoint that is complete; 0: there is none."""
    return max((checkpoint.step for checkpoint in CheckpointStore(run / "checkpoints").all()), default=0)


def start(run: Path, errors: Path, *, is_leader: bool = False) -> BaseProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    folder = run.parents[1]
    files = {"output": folder / "output", "errors": errors}
    return start_forked((*TRAIN, *place(run)), cwd=folder, environment=environment, is_leader=is_leader, **files)


def interrupted(run: Path, end: Callable[[BaseProcess], None]) -> tuple[int | None, str, str]:
    """Train, and call `end` in the step after one more checkpoint; return exit code, output and error output."""
    folder, step = run.parents[1], last_step(run) + 1
    errors = folder / "errors"
    with held_after(run / "checkpoints" / f"step-{step:06}", folder / "hold"):
        # A terminal sends Ctrl-C to all processes of a group.
        driver = start(run, errors, is_leader=True)
        while last_step(run) < step:
            assert driver.is_alive(), errors.read_text()
            time.sleep(0.01)
        end(driver)
        # The step is held back until the run has ended, or has said that it will end after the step.
        while driver.is_alive() and ASKED not in errors.read_text():
            time.sleep(0.01)
    driver.join(600)
    return driver.exitcode, (folder / "output").read_text(), errors.read_text()


def hang_up(driver: BaseProcess) -> None:
    assert driver.pid is not None
    os.killpg(driver.pid, signal.SIGHUP)


def kill(run: Path) -> None:
    """Train, and kill the run in the step after the first checkpoint."""
    folder = run.parents[1]
    errors = folder / "errors"
    with held_after(run / "checkpoints" / "step-000001", folder / "hold"):
        driver = start(run, errors)
        while last_step(run) < 1:
            assert driver.is_alive(), errors.read_text()
            time.sleep(0.01)
        driver.kill()
        driver.join()


@dataclass(frozen=True)
class Ended:
    """A run that was killed, went on, and then ended because its terminal was closed."""

    run: Path
    copy: Path
    """Copy of the run's folder as it was at this end."""
    output: str
    errors: str


@pytest.fixture(scope="module")
def ended(undisturbed: Path) -> Ended:
    run = undisturbed.with_name("interrupted")
    kill(run)
    code, output, errors = interrupted(run, hang_up)
    assert code == 130, errors
    return Ended(run, Path(shutil.copytree(run, run.with_name("copy"))), output, errors)


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of all steps, without those that measure time."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not is_timed(key)} for line in lines]


def trainer_state(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the actor's tensors in a checkpoint, as torch.distributed.checkpoint loads them in one process."""
    file = run.with_name(f"{run.name}-{step}.pt")
    dcp_to_torch_save(run / "checkpoints" / f"step-{step:06}" / "trainer", file)
    return dict(torch.load(file))


@pytest.mark.long
def test_a_run_of_another_batch_size_continues_at_the_same_row(undisturbed: Path, fivefold: Fivefold) -> None:
    def prompts(run: Path, *steps: int) -> list[str]:
        samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
        return [sample["prompt"] for sample in samples if sample["step"] in steps]

    run, earlier = undisturbed.with_name("smaller"), undisturbed / "checkpoints" / "step-000003"
    changed = ("train_dataset.batch_size=4", f"recover.mode={earlier}")
    result = fivefold(*TRAIN, *place(run), *changed, cwd=undisturbed.parents[1])
    assert result.returncode == 0, result.stderr + result.stdout
    assert "train_dataset.batch_size: 8 -> 4" in result.stdout
    assert prompts(run, 4, 5) == prompts(undisturbed, 4)
    again = fivefold(*TRAIN, *place(run), changed[0], "total_train_steps=6", cwd=undisturbed.parents[1])
    assert again.returncode == 0, again.stderr + again.stdout
    assert prompts(run, 6) == prompts(undisturbed, 5)[:16]


def test_a_run_starts_from_a_converted_checkpoint(undisturbed: Path) -> None:
    first = rows(undisturbed)[0]
    # Rollout, actor and reference all have the checkpoint's weights, and neither of the first two found others.
    assert first["rollout_mismatch"] < 0.05
    assert first["kl_ref"] == pytest.approx(0, abs=1e-6)


def test_a_killed_run_goes_on_with_the_same_bits(undisturbed: Path, ended: Ended) -> None:
    assert "continues after step" in ended.output
    done = last_step(ended.copy)
    assert 1 < done < N_STEPS
    assert rows(ended.copy) == rows(undisturbed)[:done]
    samples = (ended.copy / "samples.jsonl").read_bytes()
    assert samples.count(b"\n") == done * 32
    assert (undisturbed / "samples.jsonl").read_bytes().startswith(samples)
    mine, other = trainer_state(ended.copy, done), trainer_state(undisturbed, done)
    assert mine.keys() == other.keys()
    assert [name for name, tensor in other.items() if not torch.equal(mine[name], tensor)] == []


def test_ctrl_c_ends_after_the_step_and_another_layout_goes_on(
    undisturbed: Path, ended: Ended, fivefold: Fivefold, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ended.run
    assert ASKED in ended.errors
    assert f"trial_name={run.name}" in ended.errors, "the command that goes on"
    changed = (*place(run), "actor.backend=megatron:d1")
    monkeypatch.chdir(folder)
    refused = CliRunner().invoke(app, [*TRAIN, *changed, "train_dataset.limit=500"])
    assert refused.exit_code == 2
    assert "train_dataset.limit" in refused.stderr
    result = fivefold(*TRAIN, *changed, cwd=folder)
    assert result.returncode == 0, result.stderr + result.stdout
    assert "actor.backend" in result.stdout
    assert [row["step"] for row in rows(run)] == list(range(1, N_STEPS + 1))
    for row, other in zip(rows(run), rows(undisturbed), strict=True):
        assert row["reward/mean"] == pytest.approx(other["reward/mean"], abs=0.1)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=0.2)
    first, second = (json.loads((path / "summary.json").read_text()) for path in (run, undisturbed))
    assert first["accuracy_before"] == second["accuracy_before"]
    assert first["accuracy_after"] == pytest.approx(second["accuracy_after"], abs=0.2)
    assert first["steps"] == second["steps"]
    board = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("reward/mean")] == list(range(1, N_STEPS + 1))


def test_a_finished_run_says_so_and_stays_as_it_is(
    undisturbed: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")}
    monkeypatch.chdir(folder)
    result = CliRunner().invoke(app, [*TRAIN, *place(undisturbed)])
    assert result.exit_code == 0, result.output
    assert "finished" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")} == before


@pytest.mark.long
def test_supervised_fine_tuning_goes_on_with_the_same_bits(folder: Path, fivefold: Fivefold) -> None:
    examples = folder / "examples.jsonl"
    lines = [json.dumps({"prompt": f"{a}+{b}=", "response": str(a + b)}) for a in range(8) for b in range(8)]
    examples.write_text("\n".join(lines))
    run = folder / "tiny-moe-sft" / "trial-0"
    command = (*SFT, f"train_dataset.path={examples}", *place(run))
    result = fivefold(*command)
    assert result.returncode == 0, result.stderr + result.stdout
    whole = cut_back(run, 2)
    result = fivefold(*command)
    assert result.returncode == 0, result.stderr + result.stdout
    assert "continues after step" in result.stdout
    assert [row["step"] for row in rows(run)] == list(range(1, N_STEPS + 1))
    assert rows(run) == rows(whole)
    weights = "weights/model.safetensors"
    assert (run / weights).read_bytes() == (whole / weights).read_bytes()
