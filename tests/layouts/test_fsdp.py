"""FSDP computes and trains as Hugging Face's model with plain autograd does, and as Megatron-Core does."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import hf_reference
import megatron_cases
import pytest
import torch
from compare import assert_close
from fsdp_cases import FSDPCase
from hf_reference import Tensors
from ragged import uneven_batch
from worker_pool import Workers

from fivefold.algorithms.loss import SFTLoss

TOLERANCE = 1e-4
LAYOUTS = ("fsdp:d1", "fsdp:d2", "fsdp:c2", "fsdp:t2", "fsdp:d3", "fsdp:d2t2", "fsdp:t2c2")
MODELS = ("qwen2", "qwen3_moe")

Reference = tuple[torch.Tensor, torch.Tensor, float, Tensors]


@pytest.fixture(scope="module")
def reference(workers: Workers, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    scratch = tmp_path_factory.mktemp("gradients")

    @cache
    def of(model: str) -> Reference:
        batch, loss = uneven_batch(), SFTLoss()
        ((logprobs, entropies),) = workers(1).run(
            hf_reference.logprobs_and_entropies, models / model, batch, loss.temperature
        )
        ((value, gradients),) = workers(1).run(hf_reference.gradients, models / model, batch, loss, scratch / model)
        return logprobs, entropies, value, gradients

    return of


@pytest.mark.parametrize(("layout", "model"), [(layout, model) for layout in LAYOUTS for model in MODELS])
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
