"""Stages with unequal numbers of layers train like one process, and every layer keeps its name in the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_cases
import pytest
from compare import assert_close
from megatron_cases import Case
from ragged import uneven_batch
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.config.schema.engine import OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig

# The model has 4 layers, of which layers 1 and 3 have experts.
PIPELINES: dict[str, tuple[str, dict[str, Any]]] = {
    "nearly equal": ("megatron:p3", {}),
    "nearly equal virtual stages": ("megatron:(attn:p3v1t2|ffn:e2)", {}),
    "a layer less in the first stage": ("megatron:p2", {"num_layers_in_first_pipeline_stage": 1}),
    "interleaved, with a short last stage": (
        "megatron:p2v2",
        {"pipeline_model_parallel_layout": "Et|tt|t|L"},
    ),
    "embedding and output layer counted": (
        "megatron:p3",
        {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_uneven_stages_train_like_one_process(workers: Workers, models: Path, name: str) -> None:
    layout, fields = PIPELINES[name]
    batch, folder, optimizer = uneven_batch(), models / "qwen3_moe_mixed", OptimizerConfig(lr=1e-2, eps=1e-3)
    uneven = Case(layout, MegatronConfig(transformer=fields))
    got, wanted = (
        workers(case.world_size).run(megatron_cases.train, case, folder, batch, SFTLoss(), optimizer, 1)[0]
        for case in (uneven, Case("megatron:d1"))
    )
    assert got.steps[0].loss == pytest.approx(wanted.steps[0].loss, rel=1e-5)
    assert got.steps[0].grad_norm == pytest.approx(wanted.steps[0].grad_norm, rel=1e-5)
    assert_close(got.weights, wanted.weights, 1e-5)
