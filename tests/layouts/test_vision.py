"""Log-probs and gradients of models that see images equal those of transformers' whole models, on every layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import megatron_cases
import pytest
import torch
import vision_reference
from cases import case_of
from compare import assert_close
from fsdp_cases import FSDPCase
from hf_reference import Tensors
from megatron_cases import Case
from vision_reference import batch_with_images
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from fivefold.config.schema.engine import FSDPConfig, MicroBatchConfig
from fivefold.config.schema.megatron import MegatronConfig
from tests.rows import long

TOLERANCE = 1e-4
VisionReference = tuple[torch.Tensor, float, Tensors]

LAYOUTS = {
    "qwen3_vl": (
        *("megatron:d1", "megatron:t2", "megatron:p2", "megatron:c2", "megatron:d2", "megatron:t2c2", "megatron:p2t2"),
        *("fsdp:d1", "fsdp:d2", "fsdp:c2", "fsdp:t2"),
    ),
    "qwen3_vl_moe": ("megatron:(attn:p2t2|ffn:p2e2)", "fsdp:d2"),
    "qwen2_5_vl": ("megatron:t2", "fsdp:d1"),
    "qwen3_5": ("megatron:t2", "megatron:p2", "fsdp:d1"),
    "qwen3_5_moe": ("megatron:d1", "megatron:(attn:t2|ffn:e2)", "megatron:(attn:c2|ffn:e2)", "fsdp:d2"),
}


@pytest.fixture(scope="module")
def seeing(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    workers(1).run(vision_reference.save_models, folder)
    return folder


@pytest.fixture(scope="module")
def whole_model(
    workers: Workers, seeing: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], VisionReference]:
    """Returns what transformers' whole model makes of the batch, by the model's name."""
    scratch = tmp_path_factory.mktemp("gradients")

    @cache
    def of(model: str) -> VisionReference:
        arguments = seeing / model, batch_with_images(), scratch / model
        return workers(1).run(vision_reference.logprobs_and_gradients, *arguments)[0]

    return of


@pytest.mark.parametrize(
    "case",
    [
        # Some of these micro-batches have no image.
        Case(
            "megatron:t2",
            megatron=MegatronConfig(recompute="full"),
            micro_batches=MicroBatchConfig(max_tokens_per_mb=8),
        ),
        FSDPCase("fsdp:d1", fsdp=FSDPConfig(recompute="full")),
    ],
)
def test_layers_that_are_computed_again_add_the_same_features(
    workers: Workers, seeing: Path, whole_model: Callable[[str], VisionReference], case: Case | FSDPCase
) -> None:
    _, want_loss, want_gradients = whole_model("qwen3_vl")
    results = workers(case.world_size).run(
        megatron_cases.gradients, case, seeing / "qwen3_vl", batch_with_images(), SFTLoss()
    )
    assert results[0].loss == pytest.approx(want_loss, rel=TOLERANCE)
    assert_close(results[0].gradients, want_gradients, TOLERANCE)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *((model, each) for model, own in LAYOUTS.items() for each in own),
        *long(
            *(("qwen3_vl_moe", f"megatron:{each}") for each in ("p2", "(attn:t2|ffn:e2)", "(attn:c2|ffn:e2)")),
            *(("qwen3_vl_moe", each) for each in ("megatron:(attn:t2|ffn:t2)", "fsdp:c2", "fsdp:t2")),
        ),
    ],
)
def test_text_halves_have_the_predictions_and_gradients_of_whole_models(
    workers: Workers, seeing: Path, whole_model: Callable[[str], VisionReference], model: str, layout: str
) -> None:
    batch, case = batch_with_images(), case_of(layout)
    want_logprobs, want_loss, want_gradients = whole_model(model)
    results = workers(case.world_size).run(megatron_cases.gradients, case, seeing / model, batch, SFTLoss())
    for result in results:
        torch.testing.assert_close(result.logprobs_T, want_logprobs * batch.mask_T, rtol=TOLERANCE, atol=TOLERANCE)
        assert result.loss == pytest.approx(want_loss, rel=TOLERANCE)
    assert_close(results[0].gradients, want_gradients, TOLERANCE)
