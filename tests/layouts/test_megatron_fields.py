"""Each field of Megatron-Core that a recipe can set has its effect."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_reference
import megatron_cases
import pytest
import torch
from compare import assert_close
from hf_reference import Tensors
from megatron_cases import Case, whole
from ragged import uneven_batch
from safetensors.torch import load_file
from worker_pool import Workers

from fivefold.algorithms.loss import SFTLoss
from fivefold.config.schema.engine import MegatronConfig, OptimizerConfig
from fivefold.types import Batch

ONE_SEQUENCE = uneven_batch(lengths=(29,))


@pytest.mark.parametrize(
    "overrides",
    [{"bucket_size": 10_000}, {"overlap_grad_reduce": True}, {"overlap_grad_reduce": True, "bucket_size": 10_000}],
)
def test_gradients_are_the_same_in_small_and_overlapping_buckets(
    workers: Workers, models: Path, overrides: dict[str, Any]
) -> None:
    case, batch, optimizer = Case("megatron:d2e2"), uneven_batch(), OptimizerConfig(lr=1e-2, eps=1e-3)
    bucketed = replace(case, megatron=MegatronConfig(ddp=overrides))
    wanted, got = (
        workers(case.world_size).run(megatron_cases.train, c, models / "qwen3_moe", batch, SFTLoss(), optimizer, 2)[0]
        for c in (case, bucketed)
    )
    assert_close(got.weights, wanted.weights, 1e-5)
    assert [step.grad_norm for step in got.steps] == pytest.approx([step.grad_norm for step in wanted.steps], rel=1e-5)


def n_buckets(case: Case, folder: Path) -> int:
    engine = case.engine(folder, OptimizerConfig())
    return sum(len(group.buckets) for chunk in engine._chunks for group in chunk.bucket_groups)


def test_a_smaller_bucket_size_makes_more_buckets(workers: Workers, models: Path) -> None:
    counts = [
        workers(2).run(n_buckets, Case("megatron:d2", MegatronConfig(ddp=ddp)), models / "qwen3")[0]
        for ddp in ({}, {"bucket_size": 2000, "overlap_grad_reduce": True})
    ]
    assert counts[0] == 1 < counts[1]


def decayed(case: Case, folder: Path) -> Tensors:
    """In a worker: return the weights after a step that only decays them."""
    engine = case.engine(folder, OptimizerConfig(lr=0.1, weight_decay=0.5))
    batch = uneven_batch()
    engine.forward_backward_of(Batch(batch.lengths, batch.tokens_T, torch.zeros_like(batch.mask_T)), SFTLoss())
    engine.optim_step()
    return whole(engine.export_weights())


def test_apply_wd_to_qk_layernorm_decays_the_norms_of_queries_and_keys(workers: Workers, models: Path) -> None:
    case = Case("megatron:d1", MegatronConfig(optimizer={"apply_wd_to_qk_layernorm": True}))
    before = load_file(models / "qwen3" / "model.safetensors")
    (after,) = workers(1).run(decayed, case, models / "qwen3")
    for name, weight in before.items():
        exempt = weight.ndim == 1 and "q_norm" not in name and "k_norm" not in name
        torch.testing.assert_close(after[name], weight * (1.0 if exempt else 0.95), rtol=1e-6, atol=0)


def test_weight_decay_that_is_not_decoupled_goes_through_adam(workers: Workers, models: Path) -> None:
    """As an L2 penalty, decay is a gradient, of which Adam's first step keeps only the sign, times the whole rate."""
    case = Case("megatron:d1", MegatronConfig(optimizer={"decoupled_weight_decay": False}))
    before = load_file(models / "qwen3" / "model.safetensors")
    (after,) = workers(1).run(decayed, case, models / "qwen3")
    name = "model.layers.0.mlp.up_proj.weight"
    torch.testing.assert_close(after[name], before[name] - 0.1 * before[name].sign(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "layout", ["megatron:d1", "megatron:t2", "megatron:c2", "megatron:p2v2", "megatron:d2", "megatron:(attn:t2|ffn:e2)"]
)
@pytest.mark.parametrize("name", ["moe_aux_loss_coeff", "moe_z_loss_coeff"])
def test_the_routers_auxiliary_losses_have_the_gradients_of_their_formulas(
    workers: Workers, models: Path, tmp_path: Path, layout: str, name: str
) -> None:
    """With one sequence, virtual stages and data parallelism have micro-batches of filler only."""
    coefficient, folder = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.05}[name], models / "qwen3_moe"
    case = Case(layout, MegatronConfig(transformer={name: coefficient}))
    ((_, wanted),) = workers(1).run(
        hf_reference.gradients_with_auxiliary_loss, folder, ONE_SEQUENCE, name, coefficient, tmp_path / "hf"
    )
    ((plain_loss, plain),) = workers(1).run(hf_reference.gradients, folder, ONE_SEQUENCE, SFTLoss(), tmp_path / "plain")
    got = workers(case.world_size).run(megatron_cases.gradients, case, folder, ONE_SEQUENCE, SFTLoss())[0]
    router = "model.layers.0.mlp.gate.weight"
    assert (wanted[router] - plain[router]).norm() > 0.1 * plain[router].norm(), "the auxiliary loss must matter here"
    assert got.loss == pytest.approx(plain_loss, rel=1e-4), "the reported loss is the trained one alone"
    assert_close(got.gradients, wanted, 1e-4)
