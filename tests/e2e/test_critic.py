"""PPO with a critic: warm-up, metrics, the saved model, and a run that goes on with the same bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForTokenClassification

from tests.e2e.conftest import ROOT, Fivefold
from tests.e2e.documents import as_listed, listed_metrics

N_STEPS = 3
TRAIN = (
    "train", str(ROOT / "recipes" / "quickstart-ppo.yaml"), f"total_train_steps={N_STEPS}",
    "train_dataset.batch_size=8",
    "valid_dataset=null", "recover.freq_steps=1", f"recover.max_to_keep={N_STEPS}", "recover.snapshot=blocking",
    "critic.warmup_steps=1",
    "actor.kl_ctl=0.01", "actor.kl_in=reward", "actor.gae_lambda=0.95", "rollout.colocate=true",
    "critic.offload={params: true, grads: true, optimizer: true}", "actor.offload={params: true, optimizer: true}",
)  # fmt: skip
"""All roles take turns, what can be offloaded is, and training waits while checkpoints are written."""


@pytest.fixture(scope="module")
def run(fivefold: Fivefold, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    result = fivefold(*TRAIN, f"cluster.fileroot={root}")
    assert result.returncode == 0, result.stderr + result.stdout
    return root / "quickstart-ppo" / "trial-0"


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def state(run: Path, step: int, role: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a role in a checkpoint, as torch.distributed.checkpoint loads them in one process."""
    file = run.with_name(f"{run.name}-{step}-{role}.pt")
    dcp_to_torch_save(run / "checkpoints" / f"step-{step:06}" / role, file)
    return dict(torch.load(file))


def differing(mine: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> list[str]:
    assert mine.keys() == others.keys()
    return [name for name, tensor in others.items() if not torch.equal(mine[name], tensor)]


def test_only_the_critic_is_trained_while_it_warms_up(run: Path) -> None:
    first, second, _ = rows(run)
    of_actor = {"grad_norm", "policy_loss", "train/tflops_per_device"}
    assert of_actor.isdisjoint(first)
    assert of_actor <= second.keys()
    assert first["critic/values"] == 0, "a new head begins at 0"
    assert all(row["critic/grad_norm"] > 0 for row in rows(run))
    before = load_file(ROOT / "fivefold" / "models" / "tiny-moe" / "model.safetensors")
    actor, critic = (state(run, 1, role) for role in ("trainer", "critic"))
    assert all(torch.equal(actor[f"param/{name}"], tensor) for name, tensor in before.items())
    assert not any(torch.equal(critic[f"param/{name}"], before[name]) for name in before if name != "lm_head.weight")


def test_the_page_of_metrics_lists_those_of_a_critic(run: Path) -> None:
    names = {as_listed(name) for row in rows(run) for name in row if name.startswith("critic/")}
    listed = {name for name in listed_metrics() if name.startswith("critic/")}
    assert names == listed - {"critic/peak_memory_gb/max"}
    assert {"seconds/values", "seconds/advantages", "seconds/critic train"} <= rows(run)[0].keys()


def test_the_critic_is_saved_as_a_model_for_token_classification(run: Path) -> None:
    critic = AutoModelForTokenClassification.from_pretrained(run / "critic", dtype=torch.float32)
    assert critic.config.num_labels == 1
    assert critic.score.weight.any()
    tensors = state(run, N_STEPS, "critic")
    torch.testing.assert_close(critic.score.weight.detach(), tensors["param/score.weight"])


def test_a_run_with_a_critic_goes_on_with_the_same_bits(run: Path, fivefold: Fivefold) -> None:
    whole = Path(shutil.copytree(run, run.parents[1] / "copy" / "trial-0"))
    (run / "summary.json").unlink()
    for step in range(2, N_STEPS + 1):
        shutil.rmtree(run / "checkpoints" / f"step-{step:06}")
    result = fivefold(*TRAIN, f"cluster.fileroot={run.parents[1]}")
    assert result.returncode == 0, result.stderr + result.stdout
    assert "goes on" in result.stdout
    for mine, other in zip(rows(run), rows(whole), strict=True):
        names = [name for name in other if not any(word in name for word in ("seconds", "per_second", "flops", "busy"))]
        assert {name: mine[name] for name in names} == {name: other[name] for name in names}
    for role in ("trainer", "critic"):
        assert differing(state(run, N_STEPS, role), state(whole, N_STEPS, role)) == []
