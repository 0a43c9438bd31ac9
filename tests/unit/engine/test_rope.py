"""Rotary positions against transformers, for every kind of scaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb, apply_rotary_pos_emb_interleave
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from fivefold.engine.kernels.elementwise import cos_sin, rotate_halves, rotate_neighbours
from fivefold.engine.rope import inverse_frequencies
from fivefold.families.read import read_shape

ORIGINAL = {"original_max_position_embeddings": 64}
SCALINGS: dict[str, dict[str, Any]] = {
    "none": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "yarn for the model's own context": {"rope_type": "yarn", "factor": 4.0},
    "yarn of DeepSeek": {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7, **ORIGINAL},
    "yarn of Kimi": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, **ORIGINAL},
    "yarn with a factor of its own": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.9, "beta_fast": 8.0},
    "yarn that is not rounded": {"rope_type": "yarn", "factor": 4.0, "truncate": False, **ORIGINAL},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_cosines_and_sines_are_those_of_transformers(name: str) -> None:
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 1e4, **SCALINGS[name]},
    )
    shape = read_shape(config.to_dict())
    positions_T = torch.arange(512)
    wanted = LlamaRotaryEmbedding(config)(torch.zeros(1), positions_T[None])
    frequencies = inverse_frequencies(shape, torch.device("cpu"))
    for mine, theirs in zip(cos_sin(positions_T, frequencies, torch.float32, shape.rope_scaling), wanted, strict=True):
        torch.testing.assert_close(mine.squeeze(1), theirs[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("rotate", "theirs"),
    [(rotate_halves, apply_rotary_pos_emb), (rotate_neighbours, apply_rotary_pos_emb_interleave)],
)
def test_pairs_turn_as_in_transformers(rotate: Callable[..., torch.Tensor], theirs: Callable[..., Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    x_THD = torch.randn(5, 3, 8, generator=generator)
    cos_T1D, sin_T1D = cos_sin(torch.arange(5), torch.tensor([1.0, 0.3, 0.1, 0.03]), torch.float32, None)
    wanted, _ = theirs(x_THD[None], x_THD[None], cos_T1D.squeeze(1)[None], sin_T1D.squeeze(1)[None], unsqueeze_dim=2)
    torch.testing.assert_close(rotate(x_THD, cos_T1D, sin_T1D), wanted[0])
