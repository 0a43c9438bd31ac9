"""Optimizer steps on one ragged batch give the same loss, gradient norm and weights, however the work is split.

A single process is compared with Hugging Face's model and torch's AdamW, and every other way with the single process:
layouts, which split the optimizer's state, for two steps, and what changes only how a gradient is computed for one.

Adam divides each gradient by its own size. If a gradient is only rounding noise, such as 1e-9, an epsilon of 1e-8 would
turn this noise into steps of the whole learning rate. With 1e-3, about the size of a clipped gradient here, a rounding
error of 1e-7 moves a weight by 1e-4 of a step, while other weights move by whole steps, which the comparison of the
updates shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import hf_reference
import megatron_cases
import pytest
from compare import assert_close, difference
from hf_reference import Step, Tensors
from megatron_cases import Case, Run
from safetensors.torch import load_file
from worker_pool import Workers

from fivefold.algorithms.losses.ppo import PPO
from fivefold.algorithms.losses.sequence_ratios import GSPO
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.batch import Batch
from fivefold.config.schema.engine import MicroBatchConfig, OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig
from tests.rows import long

N_STEPS = 2
WEIGHT_TOLERANCE = 1e-5
UPDATE_TOLERANCE = 1e-4
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, beta2=0.99, gradient_clipping=0.5)

_POLICY = PolicyLoss(
    temperature=0.8,
    surrogate=PPO(0.2, 0.3),
    aggregation="token_mean",
    entropy_coeff=0.01,
    kl_coeff=0.1,
    kl_estimator="k3",
)
LOSSES: dict[str, PolicyLoss | SFTLoss] = {
    "sft": SFTLoss(),
    "token_mean": _POLICY,
    "sequence_mean": replace(_POLICY, aggregation="sequence_mean", kl_estimator="k2", surrogate=PPO(0.2, 0.3, 1.5)),
    "sequence_sum": replace(_POLICY, aggregation="sequence_sum", kl_estimator="k1", entropy_coeff=0.0),
}
OF_SEQUENCES = {"gspo": replace(_POLICY, aggregation="sequence_mean", surrogate=GSPO(0.05, 0.05))}
"""Losses whose ratios are those of whole sequences, which context parallelism splits."""
ALL_LOSSES = {**LOSSES, **OF_SEQUENCES}

LAYOUTS = (
    "megatron:d2e2",
    "megatron:(attn:t2|ffn:e2)",
    "megatron:c2e2",
    "megatron:p2v2",
    "megatron:(attn:d2p2|ffn:t2)",
    "megatron:(attn:p2t2c2|ffn:e4)",
)
FURTHER_LAYOUTS = (
    "megatron:(attn:t2c2|ffn:t2e2)",
    "megatron:(attn:t2|ffn:t2)",
    "megatron:d4e4",
    "megatron:c4e2",
    "megatron:(attn:d2t2|ffn:e4)",
    "megatron:(attn:t2p2v2|ffn:e2)",
    "megatron:(attn:d2p2v2t2|ffn:t1e2)",
)
FOLDED = ("megatron:(attn:c2|ffn:t2)", "megatron:(attn:d2t2|ffn:t2e2)")
DENSE_LAYOUTS = ("megatron:d2", "megatron:t2p2", "megatron:p2v2", "megatron:c2t2")

DEFAULT = MegatronConfig()
WAYS: dict[str, tuple[MegatronConfig, MicroBatchConfig]] = {
    "one sequence at a time": (DEFAULT, MicroBatchConfig(max_tokens_per_mb=1)),
    "all packed together, log-probs in small chunks": (
        MegatronConfig(logprob_chunk_size=5),
        MicroBatchConfig(max_tokens_per_mb=100_000),
    ),
    "at least 5 micro-batches": (DEFAULT, MicroBatchConfig(max_tokens_per_mb=100_000, n_mbs=5)),
    "selective recomputation": (MegatronConfig(recompute="selective"), MicroBatchConfig(max_tokens_per_mb=50)),
    "recomputed all-gather": (
        MegatronConfig(recompute="full", token_dispatcher="allgather"),
        MicroBatchConfig(max_tokens_per_mb=50),
    ),
}
HYBRID_LAYOUTS = ("megatron:(attn:t2|ffn:e2)", "megatron:(attn:d2p2v2t2|ffn:t1e2)")
"""Further layouts of a model with gated delta nets."""
WAYS_LAYOUTS = ("megatron:(attn:t2|ffn:e2)", "megatron:p2v2", "megatron:(attn:c2|ffn:t2)", "megatron:d1")

OTHER_MODELS = ("qwen2", "qwen3_next", "gpt_oss", "gemma3_text")

Trained = Callable[[str, str, int], Run]
"""(model, loss, number of steps) -> the run of a single process."""


@pytest.fixture(scope="module")
def alone(workers: Workers, models: Path, batch_for: Callable[[str], Batch]) -> Trained:
    def train(model: str, loss: str, n_steps: int) -> Run:
        case = Case("megatron:d1")
        (run,) = workers(1).run(
            megatron_cases.train, case, models / model, batch_for(model), ALL_LOSSES[loss], OPTIMIZER, n_steps
        )
        return run

    return cache(train)


def assert_same_run(got: Run, steps: list[Step], weights: Tensors, before: Tensors, tolerance: float) -> None:
    for mine, wanted in zip(got.steps, steps, strict=True):
        assert mine.loss == pytest.approx(wanted.loss, rel=tolerance, abs=tolerance)
        assert mine.grad_norm == pytest.approx(wanted.grad_norm, rel=tolerance)
    assert_close(got.weights, weights, tolerance)
    assert_close(difference(got.weights, before), difference(weights, before), UPDATE_TOLERANCE)


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        *(("qwen3_moe", loss) for loss in LOSSES),
        *((model, "token_mean") for model in OTHER_MODELS),
        *long(*((model, loss) for model in OTHER_MODELS for loss in LOSSES if loss != "token_mean")),
    ],
)
def test_one_process_trains_like_hugging_face_with_torchs_adamw(
    workers: Workers,
    models: Path,
    batch_for: Callable[[str], Batch],
    alone: Trained,
    tmp_path: Path,
    model: str,
    loss: str,
) -> None:
    ((steps, weights),) = workers(1).run(
        hf_reference.train, models / model, batch_for(model), LOSSES[loss], OPTIMIZER, N_STEPS, tmp_path / "hf"
    )
    before = load_file(models / model / "model.safetensors")
    run = alone(model, loss, N_STEPS)
    assert_same_run(run, steps, weights, before, 2e-5)
    # The comparison is only meaningful if some weights move by nearly the learning rate in each step.
    assert max(float(update.abs().max()) for update in difference(run.weights, before).values()) > 1.5 * OPTIMIZER.lr


@pytest.mark.parametrize(
    ("layout", "model", "loss"),
    [(layout, "qwen3_moe", "token_mean") for layout in LAYOUTS]
    + [(FOLDED[0], "qwen3_moe", loss) for loss in ("token_mean", "sequence_mean", "gspo")]
    + [(FOLDED[1], "qwen3_moe", "sequence_mean"), (DENSE_LAYOUTS[1], "qwen2", "token_mean")]
    + [(FOLDED[0], "qwen3_next", "token_mean"), (FOLDED[0], "gpt_oss", "token_mean")]
    + long(
        *((layout, "qwen3_moe", "token_mean") for layout in FURTHER_LAYOUTS),
        *((FOLDED[0], "qwen3_moe", loss) for loss in ("sft", "sequence_sum")),
        *((FOLDED[1], "qwen3_moe", loss) for loss in LOSSES if loss != "sequence_mean"),
        *((layout, "qwen2", "token_mean") for layout in DENSE_LAYOUTS if layout != DENSE_LAYOUTS[1]),
        *((layout, "qwen3_next", "token_mean") for layout in HYBRID_LAYOUTS),
        (DENSE_LAYOUTS[0], "gemma3_text", "token_mean"),
    ),
)
def test_every_layout_trains_like_one_process(
    workers: Workers,
    models: Path,
    batch_for: Callable[[str], Batch],
    alone: Trained,
    layout: str,
    model: str,
    loss: str,
) -> None:
    case = Case(layout)
    runs = workers(case.world_size).run(
        megatron_cases.train, case, models / model, batch_for(model), ALL_LOSSES[loss], OPTIMIZER, N_STEPS
    )
    wanted = alone(model, loss, N_STEPS)
    before = load_file(models / model / "model.safetensors")
    assert_same_run(runs[0], wanted.steps, wanted.weights, before, WEIGHT_TOLERANCE)
    for run in runs:
        assert run.steps == runs[0].steps, "the ranks got different losses or gradient norms"
        for mine, theirs in zip(run.metrics, wanted.metrics, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("layout", "model", "way"),
    [(WAYS_LAYOUTS[0], "qwen2_moe", way) for way in WAYS]
    + [(WAYS_LAYOUTS[1], "qwen2_moe", next(iter(WAYS)))]
    + long(*((WAYS_LAYOUTS[1], "qwen2_moe", way) for way in list(WAYS)[1:]))
    + long(*((layout, "qwen2_moe", way) for layout in WAYS_LAYOUTS[2:] for way in WAYS))
    + long(*((layout, "qwen3_next", way) for layout in ("megatron:d1", WAYS_LAYOUTS[0]) for way in WAYS)),
)
def test_every_split_and_schedule_trains_the_same(
    workers: Workers, models: Path, batch_for: Callable[[str], Batch], alone: Trained, layout: str, model: str, way: str
) -> None:
    megatron, micro_batches = WAYS[way]
    case = Case(layout, megatron, micro_batches=micro_batches)
    runs = workers(case.world_size).run(
        megatron_cases.train,
        case,
        models / model,
        batch_for(model),
        LOSSES["token_mean"],
        OPTIMIZER,
        1,
    )
    wanted = alone(model, "token_mean", 1)
    before = load_file(models / model / "model.safetensors")
    assert_same_run(runs[0], wanted.steps, wanted.weights, before, WEIGHT_TOLERANCE)
