"""PPO with every role at once: actor, critic, rollout, reward model, teacher, and a reference that follows the actor.

Beside rewards and teacher, the actor learns an expert's responses and its own right completions.

The roles take turns on devices that they share, what can be offloaded is, training waits while checkpoints are written,
and the run goes on with the same bits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForTokenClassification

from tests.e2e.conftest import ROOT, Fivefold, cut_back, is_timed
from tests.e2e.documents import as_listed, listed_metrics
from tests.e2e.reward_models import TINY, check_scores, write_reward_model

N_STEPS = 3
TRAIN = (
    "train", str(ROOT / "recipes" / "quickstart-ppo.yaml"), f"total_train_steps={N_STEPS}", "experiment_name=roles",
    "train_dataset.batch_size=8", "valid_dataset=null", "actor.ppo_n_minibatches=1", "actor.gae_lambda=0.95",
    "recover.freq_steps=1", f"recover.max_to_keep={N_STEPS}", "recover.snapshot=blocking", "stats.n_logged_samples=8",
    "rollout.colocate=true", "actor.offload={params: true, optimizer: true}",
    "critic.offload={params: true, grads: true, optimizer: true}", "critic.warmup_steps=1",
    "actor.kl_ctl=0.05", "ref={backend: megatron:d1, offload: true, ema_decay: 0.5}",
    "teacher={path: package:tiny-moe-trained, backend: megatron:d1, dtype: float32}",
    "actor.distill={coeff: 0.1, over: top_k, top_k: 4}", "actor.positive_nll_coeff=0.1",
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def command(root: Path) -> tuple[str, ...]:
    scores = {"fn": "model", "weight": 0.1}
    right = {"fn": "exact_match", "kwargs": {"pattern": r"(?:^|=)(\d+)$"}}
    model = {"path": str(write_reward_model(root / "model")), "backend": "megatron:d1", "dtype": "float32"}
    reward = {"rewards": {"right": right, "liked": scores}, "model": {**model, "offload": True}}
    demonstrations = [{"prompt": f"{n}+{n}=", "response": str(2 * n)} for n in range(10, 20)]
    (root / "expert.jsonl").write_text("\n".join(map(json.dumps, demonstrations)))
    expert = {"path": str(root / "expert.jsonl"), "batch_size": 4, "weight": 0.4, "final_weight": 0.2, "decay_steps": 2}
    return (
        *TRAIN, f"cluster.fileroot={root}", f"reward={json.dumps(reward)}",
        f"expert_dataset={json.dumps({**expert, 'token_weight': 'phi'})}",
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(fivefold: Fivefold, root: Path, command: tuple[str, ...]) -> Path:
    result = fivefold(*command)
    assert result.returncode == 0, result.stderr + result.stdout
    return root / "roles" / "trial-0"


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def state(run: Path, step: int, role: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a role in a checkpoint, as torch.distributed.checkpoint loads them in one process."""
    file = run.with_name(f"{run.name}-{step}-{role}.pt")
    dcp_to_torch_save(run / "checkpoints" / f"step-{step:06}" / role, file)
    return dict(torch.load(file))


def parameters(run: Path, step: int, role: str) -> dict[str, torch.Tensor]:
    """Return a role's parameters in a checkpoint, by their names in the model."""
    return {
        name.removeprefix("param/"): tensor
        for name, tensor in state(run, step, role).items()
        if name.startswith("param/")
    }


def differing(mine: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> list[str]:
    assert mine.keys() == others.keys()
    return [name for name, tensor in others.items() if not torch.equal(mine[name], tensor)]


def test_only_the_critic_is_trained_while_it_warms_up(run: Path) -> None:
    first, *others = rows(run / "metrics.jsonl")
    of_actor = {"grad_norm", "policy_loss", "train/tflops_per_device"}
    assert of_actor.isdisjoint(first)
    assert all(of_actor <= row.keys() for row in others)
    assert first["critic/values"] == 0, "a new head begins at 0"
    assert all(row["critic/grad_norm"] > 0 for row in [first, *others])
    before = load_file(TINY / "model.safetensors")
    actor, critic = (parameters(run, 1, role) for role in ("trainer", "critic"))
    assert all(torch.equal(actor[name], tensor) for name, tensor in before.items())
    assert not any(torch.equal(critic[name], before[name]) for name in before if name != "lm_head.weight")


def test_the_page_of_metrics_lists_those_of_a_critic(run: Path) -> None:
    written = rows(run / "metrics.jsonl")
    names = {as_listed(name) for row in written for name in row if name.startswith("critic/")}
    listed = {name for name in listed_metrics() if name.startswith("critic/")}
    # Those of GPUs, of pipelines, and of auxiliary losses, which the recipe does not have.
    of_gpus = ("peak_memory_gb/max", "peak_memory_gb/values", "allocator_retries/max")
    elsewhere = {f"critic/{name}" for name in (*of_gpus, "pipeline/bubble")}
    assert names == listed - elsewhere - {name for name in listed if name.endswith(("aux_loss", "z_loss"))}
    assert {"seconds/values", "seconds/advantages", "seconds/critic train"} <= written[0].keys()


def test_the_critic_is_saved_as_a_model_for_token_classification(run: Path) -> None:
    critic = AutoModelForTokenClassification.from_pretrained(run / "critic", dtype=torch.float32)
    assert critic.config.num_labels == 1
    assert critic.score.weight.any()
    tensors = parameters(run, N_STEPS, "critic")
    torch.testing.assert_close(critic.score.weight.detach(), tensors["score.weight"])


def test_scores_are_those_of_hugging_faces_model(run: Path, root: Path) -> None:
    samples = rows(run / "samples.jsonl")
    assert len(samples) == 8 * N_STEPS
    check_scores(samples, root / "model")


def test_the_reference_is_a_moving_average_of_the_actor(run: Path) -> None:
    average = load_file(TINY / "model.safetensors")
    for step in range(1, N_STEPS + 1):
        actor = parameters(run, step, "trainer")
        average = {name: 0.5 * average[name] + 0.5 * tensor for name, tensor in actor.items()}
        for name, tensor in parameters(run, step, "reference").items():
            torch.testing.assert_close(tensor, average[name], rtol=1e-6, atol=1e-7)
    # The reference is the actor itself until the actor is trained, in the second step.
    _, second, last = rows(run / "metrics.jsonl")
    assert second["kl_ref"] == pytest.approx(0, abs=1e-6)
    assert last["kl_ref"] > 1e-6


def test_scores_and_the_divergence_from_the_teacher_have_curves(run: Path) -> None:
    for row in rows(run / "metrics.jsonl"):
        assert row["seconds/teacher"] > 0
        assert row["reward/liked/min"] <= row["reward/liked/mean"] <= row["reward/liked/max"]
        assert row["offload/freed_gb"] > 0
        if row["step"] > 1:
            assert row["teacher_kl"] > 0


def test_the_expert_is_a_part_of_the_loss_by_its_schedule(run: Path) -> None:
    warming_up, *others = rows(run / "metrics.jsonl")
    assert "imitation_nll" not in warming_up
    assert [row["imitation_weight"] for row in others] == pytest.approx([0.3, 0.2])
    assert all(row["imitation_nll"] > 0 for row in others)


def test_the_run_goes_on_with_the_same_bits(run: Path, fivefold: Fivefold, command: tuple[str, ...]) -> None:
    whole = cut_back(run, 1)
    result = fivefold(*command)
    assert result.returncode == 0, result.stderr + result.stdout
    assert "continues after step" in result.stdout
    for mine, other in zip(rows(run / "metrics.jsonl"), rows(whole / "metrics.jsonl"), strict=True):
        names = [name for name in other if not is_timed(name)]
        assert {name: mine[name] for name in names} == {name: other[name] for name in names}
    for role in ("trainer", "critic", "reference"):
        assert differing(state(run, N_STEPS, role), state(whole, N_STEPS, role)) == []
