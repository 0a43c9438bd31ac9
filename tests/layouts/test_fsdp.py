"""FSDP computes, trains, saves and resumes as Hugging Face's model with plain autograd does, and as Megatron-Core does.

The tolerances are those of `test_agreement.py`, for the same reasons.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import hf_reference
import megatron_cases
import pytest
import torch
from compare import assert_close, difference
from fsdp_cases import FSDPCase
from hf_reference import Reference, Tensors
from megatron_cases import Case, Run
from ragged import uneven_batch
from safetensors.torch import load_file
from worker_pool import Workers

from fivefold.algorithms.losses.ppo import PPO
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.batch import Batch
from fivefold.config.schema.engine import FSDPConfig, MicroBatchConfig, OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig
from tests.rows import long

TOLERANCE = 1e-4
N_STEPS = 2
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, beta2=0.99, gradient_clipping=0.5)
LOSS = PolicyLoss(
    temperature=0.8,
    surrogate=PPO(0.2, 0.3),
    aggregation="token_mean",
    entropy_coeff=0.01,
    kl_coeff=0.1,
    kl_estimator="k3",
)

# The vocabulary is a prime number, and none of the dimensions of a tiny model is a multiple of 3, so that d3 and t2 cut
# unevenly. Each family has something of its own: scaled rotations, biases and a tied output layer, norms of heads, and
# four kinds of experts.
CASES = [
    ("fsdp:d1", "qwen3_moe"),
    ("fsdp:d2", "llama"),
    ("fsdp:d3", "minimax_m2"),
    ("fsdp:c2", "qwen3"),
    ("fsdp:d2", "mixtral"),
    ("fsdp:c2", "gpt_oss"),
    ("fsdp:d2", "gemma3_text"),
    ("fsdp:t2", "qwen2_moe"),
    ("fsdp:d3", "qwen3_moe_mixed"),
    ("fsdp:t2c2", "deepseek_v3"),
    ("fsdp:d2", "glm_moe_dsa"),
    ("fsdp:t2c2", "qwen3_next"),
    *long(
        ("fsdp:d2t2", "glm4_moe"),
        ("fsdp:d2t2", "qwen3_5"),
        ("fsdp:d2t2", "mistral"),
        ("fsdp:d3", "qwen2"),
        ("fsdp:d2c2", "qwen3_moe_sparse_step"),
        ("fsdp:t2c2", "qwen3_moe"),
        ("fsdp:t2c2", "minimax_m2"),
        ("fsdp:t2", "qwen2"),
        ("fsdp:d2", "gpt_oss"),
        ("fsdp:t2c2", "gemma3_text"),
        ("fsdp:d3t2", "gpt_oss"),
        ("fsdp:d2t2", "qwen3"),
        ("fsdp:c2", "deepseek_v2"),
        ("fsdp:t2c2", "deepseek_v32"),
        ("fsdp:d1", "qwen3_next"),
        ("fsdp:d2t2", "qwen3_next"),
        ("fsdp:t2c2", "qwen3_5_moe"),
    ),
]


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_predictions_and_gradients_are_those_of_hugging_face(
    workers: Workers, models: Path, reference: Callable[[str], Reference], layout: str, model: str
) -> None:
    batch, case = uneven_batch(), FSDPCase(layout)
    want_logprobs, want_entropies, want_loss, want_gradients = reference(model)
    results = workers(case.world_size).run(megatron_cases.gradients, case, models / model, batch, SFTLoss())
    for result in results:
        torch.testing.assert_close(result.logprobs_T, want_logprobs * batch.mask_T, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(result.entropy_T, want_entropies * batch.mask_T, rtol=TOLERANCE, atol=TOLERANCE)
        assert result.loss == pytest.approx(want_loss, rel=TOLERANCE)
    assert_close(results[0].gradients, want_gradients, TOLERANCE)


def held(case: FSDPCase, folder: Path) -> int:
    """In a worker: return how many elements of the model this rank holds."""
    return sum(shard.values_N.numel() for shard in case.engine(folder).shards)


def test_ranks_hold_equal_shares_whatever_the_number_of_experts(workers: Workers, models: Path) -> None:
    found = workers(3).run(held, FSDPCase("fsdp:d3"), models / "mixtral")
    assert max(found) < 1.03 * min(found)


def test_what_a_config_says_about_outputs_and_kernels_changes_nothing(
    workers: Workers, models: Path, tmp_path: Path
) -> None:
    model, batch, case = models / "qwen3_moe", uneven_batch(), FSDPCase("fsdp:d1")
    keys = {"return_dict": False, "output_hidden_states": True, "experts_implementation": "deepgemm"}
    shutil.copytree(model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, **keys}))
    plain, odd = (
        workers(1).run(megatron_cases.gradients, case, folder, batch, SFTLoss())[0]
        for folder in (model, tmp_path / "model")
    )
    assert_close(odd.gradients, plain.gradients, 0.0)


@pytest.fixture(scope="module")
def on_megatron(workers: Workers, models: Path, batch_for: Callable[[str], Batch]) -> Callable[[str], Run]:
    """Returns the run of a single process of Megatron-Core."""

    def train(model: str) -> Run:
        case = Case("megatron:d1")
        return workers(1).run(megatron_cases.train, case, models / model, batch_for(model), LOSS, OPTIMIZER, N_STEPS)[0]

    return cache(train)


def assert_same_run(runs: list[Run], wanted: Run, before: Tensors) -> None:
    assert_close(runs[0].weights, wanted.weights, 1e-5)
    assert_close(difference(runs[0].weights, before), difference(wanted.weights, before), TOLERANCE)
    for run in runs:
        assert run.steps == runs[0].steps, "the ranks got different losses or gradient norms"
        for mine, theirs in zip(run.steps, wanted.steps, strict=True):
            assert mine.loss == pytest.approx(theirs.loss, rel=1e-5, abs=1e-5)
            assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
        for found, metrics in zip(run.metrics, wanted.metrics, strict=True):
            assert found == pytest.approx(metrics, rel=1e-4, abs=1e-5)


AHEAD = FSDPConfig(reshard_after_forward=2, forward_prefetch=2, backward_prefetch=2)
RECOMPUTING = FSDPConfig(recompute="full", reshard_after_forward=False, logprob_chunk_size=5)


@pytest.mark.parametrize(
    ("case", "model"),
    [
        (FSDPCase("fsdp:d2t2", RECOMPUTING), "qwen3_moe"),
        (FSDPCase("fsdp:d4", AHEAD), "qwen3_moe"),
        (FSDPCase("fsdp:d2", micro_batches=MicroBatchConfig(max_tokens_per_mb=100_000, n_mbs=5)), "qwen3_moe"),
        (FSDPCase("fsdp:t2"), "qwen3_moe"),
        (FSDPCase("fsdp:c2"), "qwen3_moe"),
        *long(
            (FSDPCase("fsdp:d1"), "qwen2"),
            (FSDPCase("fsdp:d3"), "qwen2"),
            (FSDPCase("fsdp:d2"), "qwen3_moe"),
            (FSDPCase("fsdp:t2c2", RECOMPUTING), "qwen2"),
            (FSDPCase("fsdp:t2c2", RECOMPUTING), "deepseek_v3"),
            (FSDPCase("fsdp:d4t2", AHEAD), "qwen3_moe"),
        ),
    ],
    ids=lambda value: value.layout if isinstance(value, FSDPCase) else value,
)
def test_training_gives_the_numbers_of_megatron(
    workers: Workers,
    models: Path,
    batch_for: Callable[[str], Batch],
    on_megatron: Callable[[str], Run],
    case: FSDPCase,
    model: str,
) -> None:
    runs = workers(case.world_size).run(
        megatron_cases.train, case, models / model, batch_for(model), LOSS, OPTIMIZER, N_STEPS
    )
    assert_same_run(runs, on_megatron(model), load_file(models / model / "model.safetensors"))


def test_weight_decay_that_is_not_decoupled_is_that_of_megatron(
    workers: Workers, models: Path, batch_for: Callable[[str], Batch]
) -> None:
    ours = FSDPCase("fsdp:d1", FSDPConfig(optimizer={"decoupled_weight_decay": False}))
    theirs = Case("megatron:d1", MegatronConfig(optimizer={"decoupled_weight_decay": False}))
    got, wanted, plain = (
        workers(1).run(megatron_cases.train, case, models / "qwen2", batch_for("qwen2"), LOSS, OPTIMIZER, N_STEPS)
        for case in (ours, theirs, FSDPCase("fsdp:d1"))
    )
    assert_same_run(got, wanted[0], load_file(models / "qwen2" / "model.safetensors"))
    assert got[0].steps != plain[0].steps


def test_gradients_may_be_summed_over_ranks_in_bfloat16(
    workers: Workers, models: Path, batch_for: Callable[[str], Batch]
) -> None:
    norms = [
        workers(2)
        .run(
            megatron_cases.train,
            FSDPCase("fsdp:d2", FSDPConfig(mp_policy={"reduce_dtype": dtype}), dtype="bfloat16"),
            models / "qwen2-bf16", batch_for("qwen2"), LOSS, OPTIMIZER, 1,
        )[0]
        .steps[0]
        .grad_norm
        for dtype in ("float32", "bfloat16")
    ]  # fmt: skip
    assert norms[0] == pytest.approx(norms[1], rel=0.01)
    assert norms[0] != norms[1]


def test_training_gives_the_numbers_of_hugging_face_with_torchs_adamw(
    workers: Workers, models: Path, batch_for: Callable[[str], Batch], tmp_path: Path
) -> None:
    model, case = models / "qwen3_moe", FSDPCase("fsdp:d2")
    batch = batch_for("qwen3_moe")
    ((steps, weights),) = workers(1).run(hf_reference.train, model, batch, LOSS, OPTIMIZER, N_STEPS, tmp_path / "hf")
    run, _ = workers(2).run(megatron_cases.train, case, model, batch, LOSS, OPTIMIZER, N_STEPS)
    for mine, theirs in zip(run.steps, steps, strict=True):
        assert (mine.loss, mine.grad_norm) == pytest.approx((theirs.loss, theirs.grad_norm), rel=2e-5, abs=1e-6)
    before = load_file(model / "model.safetensors")
    assert_close(difference(run.weights, before), difference(weights, before), TOLERANCE)
    # The comparison is only meaningful if some weights move by nearly the learning rate in each step.
    assert max(float(update.abs().max()) for update in difference(run.weights, before).values()) > 1.5 * OPTIMIZER.lr
