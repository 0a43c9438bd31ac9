"""Log-probs and gradients of every family, on every kind of layout, equal those of Hugging Face's model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import megatron_cases
import pytest
import torch
from compare import assert_close
from hf_reference import Reference
from megatron_cases import Case
from ragged import uneven_batch
from tiny_models import DENSE, MOE
from worker_pool import Workers

from fivefold.algorithms.supervised_losses import SFTLoss
from tests.rows import long

TOLERANCE = 1e-4

SMALL_LAYOUTS = {DENSE: ("megatron:t2",), MOE: ("megatron:(attn:t2|ffn:e2)",)}
OTHER_LAYOUTS = {
    "megatron:d1": ("llama", "qwen3_moe", "deepseek_v32"),
    "megatron:c2": ("llama", "qwen3_5", "gemma3_text"),
    "megatron:(attn:c2|ffn:t2)": ("qwen3_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe", "deepseek_v3"),
    "megatron:t4": ("qwen3",),
    "megatron:c2d2": ("mistral",),
    "megatron:p2v2": ("llama", "qwen3_moe_mixed", "qwen3_next", "gpt_oss"),
    "megatron:p2t2c2": ("qwen2",),
    "megatron:(attn:t2p2|ffn:t2)": ("mixtral", "deepseek_v2", "glm4_moe_lite"),
    "megatron:(attn:c2d2|ffn:t2e2)": ("qwen3_moe_sparse_step",),
    "megatron:(attn:p2t2c2|ffn:e4)": ("qwen3_moe", "qwen3_next", "glm_moe_dsa"),
}


def others(names: tuple[str, ...], layout: str) -> tuple[str, ...]:
    return tuple(name for name in names if name not in OTHER_LAYOUTS[layout])


FURTHER_LAYOUTS = {
    "megatron:d1": others((*DENSE, *MOE, "glm_moe_dsa"), "megatron:d1"),
    "megatron:c2": others(DENSE, "megatron:c2"),
    "megatron:(attn:c2|ffn:t2)": others(MOE, "megatron:(attn:c2|ffn:t2)"),
    "megatron:c2d2": ("llama",),
    "megatron:p2v2": others((*DENSE, *MOE), "megatron:p2v2"),
    "megatron:p2t2c2": ("mistral", "gemma3_text"),
    "megatron:(attn:t2p2|ffn:t2)": ("qwen3_moe_mixed", "glm_moe_dsa"),
    "megatron:(attn:c2d2|ffn:t2e2)": ("qwen2_moe", "deepseek_v2"),
    "megatron:(attn:p2t2c2|ffn:e4)": ("qwen2_moe", "minimax_m2", "gpt_oss", "deepseek_v3", "deepseek_v32"),
}
CASES = [
    *((layout, model) for models, layouts in SMALL_LAYOUTS.items() for layout in layouts for model in models),
    *((layout, model) for layout, models in OTHER_LAYOUTS.items() for model in models),
    *long(*((layout, model) for layout, models in FURTHER_LAYOUTS.items() for model in models)),
]
"""Tensors and experts in shares with every family, and other ways and ways together with some."""


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
