"""Runs with images: their layouts agree, they resume with the same bits, and their folders hold the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fivefold.bridge.weight_files import PROCESSOR_FILES
from tests.e2e.conftest import ROOT, Fivefold, cut_back, is_timed
from tests.rows import long

N_STEPS = 3
TRAIN = (
    "train", str(ROOT / "recipes" / "squares.yaml"), f"total_train_steps={N_STEPS}", "train_dataset.batch_size=8",
    "gconfig.n_samples=4", "valid_dataset.limit=16", "recover.freq_steps=1", f"recover.max_to_keep={N_STEPS}",
    "actor.kl_ctl=0.01", "actor.optimizer.eps=1e-3", "stats.n_logged_samples=4",
)  # fmt: skip
"""A large eps keeps Adam from amplifying rounding errors. There is a reference, which sees the images too."""
MODEL = ROOT / "fivefold" / "models" / "tiny-vl"


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def trained(fivefold: Fivefold, folder: Path, *keys: str) -> list[dict[str, Any]]:
    result = fivefold(*TRAIN, f"cluster.fileroot={folder}", *keys)
    assert result.returncode == 0, result.stderr + result.stdout
    return rows(folder / "squares" / "trial-0")


@pytest.mark.long
def test_a_run_on_fsdp_goes_on_on_megatron(fivefold: Fivefold, tmp_path: Path) -> None:
    run = tmp_path / "squares" / "trial-0"
    on_fsdp = trained(fivefold, tmp_path, "actor.backend=fsdp:d2")
    assert all(row["grad_norm"] > 0 and row["rollout_mismatch/max"] < 0.02 for row in on_fsdp), "it sees other images"
    cut_back(run, 1)
    on_megatron = trained(fivefold, tmp_path, "actor.backend=megatron:t2")
    for mine, other in zip(on_megatron, on_fsdp, strict=True):
        for name in ("reward/mean", "policy_loss", "grad_norm", "kl_ref", "lr"):
            assert mine[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize("staleness", [1, *long(0)])
def test_a_run_that_resumes_has_the_same_bits(fivefold: Fivefold, tmp_path: Path, staleness: int) -> None:
    run, keys = tmp_path / "squares" / "trial-0", (f"rollout.max_head_offpolicyness={staleness}",)
    first = trained(fivefold, tmp_path, *keys)
    weights = load_file(run / "weights" / "model.safetensors")
    cut_back(run, 1)
    again = trained(fivefold, tmp_path, *keys)
    for mine, other in zip(again, first, strict=True):
        # What a replica sampled before the checkpoint is not its work after it.
        assert {name: value for name, value in mine.items() if not is_timed(name) and "replica" not in name} == {
            name: value for name, value in other.items() if not is_timed(name) and "replica" not in name
        }
    for name, tensor in load_file(run / "weights" / "model.safetensors").items():
        assert tensor.equal(weights[name]), name
    _check_folder(run, weights)


def _check_folder(run: Path, weights: dict[str, torch.Tensor]) -> None:
    """Check that the text half was trained, that all else is as it was, and that samples tell of images."""
    before = load_file(MODEL / "model.safetensors")
    assert weights.keys() == before.keys()
    changed = {name for name, tensor in weights.items() if not tensor.equal(before[name])}
    assert changed
    assert not any(".visual." in name for name in changed)
    for name in PROCESSOR_FILES:
        assert (run / "weights" / name).is_file() == (MODEL / name).is_file()
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert all("⟦image, 4 x 4 tokens⟧" in sample["prompt"] for sample in samples)


GAME = """
class Asks:
    def reset(self):
        return "what colour"

    def step(self, move):
        return "is the square", float("red" in move), False
"""


@pytest.mark.long
def test_episodes_of_several_turns_train_on_what_each_turn_has_seen(fivefold: Fivefold, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(GAME)
    environment = {
        "game": f"{tmp_path / 'asks.py'}:Asks", "turn_template": "the {observation}", "max_turns": 3, "max_length": 96
    }  # fmt: skip
    keys = [f"environment.{key}={value}" for key, value in environment.items()]
    keys += ["gconfig.max_new_tokens=2", "reward.fn=environment", "actor.backend=megatron:t2"]
    played = trained(fivefold, tmp_path, *keys)
    assert all(row["grad_norm"] > 0 and row["rollout_mismatch/max"] < 0.02 for row in played), "it sees other images"
    assert {row["episode/turns/mean"] for row in played} == {3.0}
