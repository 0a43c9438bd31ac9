"""Models that are not trained, beside the actor: a reward model, a teacher, and a reference that follows the actor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.conftest import ROOT, Fivefold

TINY = ROOT / "fivefold" / "models" / "tiny-moe"
N_STEPS = 3
TRAIN = (
    "train", str(ROOT / "recipes" / "quickstart.yaml"), f"total_train_steps={N_STEPS}", "experiment_name=frozen",
    "train_dataset.batch_size=8", "gconfig.n_samples=4", "actor.ppo_n_minibatches=1", "valid_dataset=null",
    "recover.freq_steps=1", f"recover.max_to_keep={N_STEPS}", "stats.n_logged_samples=8",
    "actor.kl_ctl=0.05", "ref={backend: megatron:t2, offload: true, ema_decay: 0.5, mb_spec: {max_tokens_per_mb: 512}}",
    "teacher={path: package:tiny-moe-trained, backend: megatron:p2, dtype: float32}",
    "actor.distill={coeff: 0.1, over: top_k, top_k: 4}",
)  # fmt: skip


def reward_model(folder: Path) -> Path:
    """Write a model for sequence classification with random scores, and return its folder."""
    model = AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=1, dtype=torch.float32)
    model.score.weight.data.normal_(std=0.5, generator=torch.Generator().manual_seed(3))
    model.config.pad_token_id = None
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def command(root: Path) -> tuple[str, ...]:
    scores = {"fn": "model", "weight": 0.1}
    right = {"fn": "exact_match", "kwargs": {"pattern": r"(?:^|=)(\d+)$"}}
    model = {"path": str(reward_model(root / "model")), "backend": "megatron:d2", "dtype": "float32"}
    reward = {"rewards": {"right": right, "liked": scores}, "model": {**model, "offload": True}}
    return (*TRAIN, f"cluster.fileroot={root}", f"reward={json.dumps(reward)}")


@pytest.fixture(scope="module")
def run(fivefold: Fivefold, root: Path, command: tuple[str, ...]) -> Path:
    result = fivefold(*command)
    assert result.returncode == 0, result.stderr + result.stdout
    return root / "frozen" / "trial-0"


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@torch.no_grad()
def test_scores_are_those_of_hugging_faces_model(run: Path, root: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(root / "model", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    samples = rows(run / "samples.jsonl")
    assert len(samples) == 8 * N_STEPS
    for sample in samples:
        ids = tokenizer(sample["prompt"] + sample["response"])["input_ids"]
        expected = model(torch.tensor([[*ids, tokenizer.eos_token_id]])).logits[0, 0]
        assert sample["reward/liked"] == pytest.approx(float(expected), abs=2e-5)
        assert sample["reward"] == pytest.approx(sample["reward/right"] + 0.1 * sample["reward/liked"])


def state(run: Path, step: int, role: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a role in a checkpoint, as torch.distributed.checkpoint loads them in one process."""
    file = run.with_name(f"{run.name}-{step}-{role}.pt")
    dcp_to_torch_save(run / "checkpoints" / f"step-{step:06}" / role, file)
    tensors = dict(torch.load(file))
    return {name: tensor for name, tensor in tensors.items() if name.startswith("param/")}


def test_the_reference_is_a_moving_average_of_the_actor(run: Path) -> None:
    average = {f"param/{name}": tensor for name, tensor in load_file(TINY / "model.safetensors").items()}
    for step in range(1, N_STEPS + 1):
        actor = state(run, step, "trainer")
        average = {name: 0.5 * average[name] + 0.5 * tensor for name, tensor in actor.items()}
        for name, tensor in state(run, step, "reference").items():
            torch.testing.assert_close(tensor, average[name], rtol=1e-6, atol=1e-7)
    # At first the reference is the actor itself.
    divergences = [row["kl_ref"] for row in rows(run / "metrics.jsonl")]
    assert divergences[0] == pytest.approx(0, abs=1e-6)
    assert divergences[-1] > 1e-6


def test_the_run_goes_on_with_the_same_bits(run: Path, fivefold: Fivefold, command: tuple[str, ...]) -> None:
    whole = Path(shutil.copytree(run, run.parents[1] / "copy" / "trial-0"))
    (run / "summary.json").unlink()
    for step in range(2, N_STEPS + 1):
        shutil.rmtree(run / "checkpoints" / f"step-{step:06}")
    result = fivefold(*command)
    assert result.returncode == 0, result.stderr + result.stdout
    for mine, other in zip(rows(run / "metrics.jsonl"), rows(whole / "metrics.jsonl"), strict=True):
        names = [name for name in other if not any(word in name for word in ("seconds", "per_second", "flops", "busy"))]
        assert {name: mine[name] for name in names} == {name: other[name] for name in names}
    for role in ("trainer", "reference"):
        mine, others = state(run, N_STEPS, role), state(whole, N_STEPS, role)
        assert all(torch.equal(mine[name], tensor) for name, tensor in others.items())


def test_scores_and_the_divergence_from_the_teacher_have_curves(run: Path) -> None:
    for row in rows(run / "metrics.jsonl"):
        assert row["teacher_kl"] > 0
        assert row["seconds/teacher"] > 0
        assert row["reward/liked/min"] <= row["reward/liked/mean"] <= row["reward/liked/max"]
        assert row["offload/freed_gb"] > 0
