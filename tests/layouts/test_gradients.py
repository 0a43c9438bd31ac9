"""Log-probs and gradients of every family, on every kind of layout, equal those of Hugging Face's model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import hf_reference
import megatron_cases
import pytest
import torch
from compare import assert_close
from hf_reference import Tensors
from megatron_cases import Case
from ragged import uneven_batch
from tiny_models import DENSE, MOE
from worker_pool import Workers

from fivefold.algorithms.loss import SFTLoss

TOLERANCE = 1e-4

DENSE_LAYOUTS = (
    "megatron:d1",
    "megatron:t2",
    "megatron:c2",
    "megatron:p2v2",
    "megatron:t4",
    "megatron:c2d2",
    "megatron:p2t2c2",
)
MOE_LAYOUTS = (
    "megatron:d1",
    "megatron:p2v2",
    "megatron:(attn:t2|ffn:e2)",
    "megatron:(attn:c2|ffn:t2)",
    "megatron:(attn:t2p2|ffn:t2)",
    "megatron:(attn:c2d2|ffn:t2e2)",
    "megatron:(attn:p2t2c2|ffn:e4)",
)
CASES = [(layout, model) for layout in DENSE_LAYOUTS for model in DENSE] + [
    (layout, model) for layout in MOE_LAYOUTS for model in MOE
]

Reference = tuple[torch.Tensor, torch.Tensor, float, Tensors]
"""Log-probs, entropies, loss and gradient."""


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


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_predictions_and_gradients_are_those_of_hugging_face(
    workers: Workers, models: Path, reference: Callable[[str], Reference], layout: str, model: str
) -> None:
    batch, case = uneven_batch(), Case(layout)
    want_logprobs, want_entropies, want_loss, want_gradients = reference(model)
    results = workers(case.world_size).run(megatron_cases.gradients, case, models / model, batch, SFTLoss())
    for result in results:
        torch.testing.assert_close(result.logprobs_T, want_logprobs * batch.mask_T, rtol=TOLERANCE, atol=TOLERANCE)
        torch.testing.assert_close(result.entropy_T, want_entropies * batch.mask_T, rtol=TOLERANCE, atol=TOLERANCE)
        assert result.loss == pytest.approx(want_loss, rel=TOLERANCE)
    assert_close(results[0].gradients, want_gradients, TOLERANCE)
