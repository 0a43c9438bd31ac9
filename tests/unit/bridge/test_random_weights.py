"""Random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from fivefold.bridge.random_weights import RandomWeights

SHAPES = {"model.layers.0.mlp.up_proj.weight": (64, 32), "model.norm.weight": (32,), "model.bias": (8,)}


def test_norms_and_decays_begin_as_in_transformers(tmp_path: Path) -> None:
    config = Qwen3NextConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=4, num_experts=0)
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config)
    names = {name: tensor for name, tensor in model.named_parameters() if tensor.ndim == 1}
    shapes = {name: tuple(tensor.shape) for name, tensor in names.items()}
    cpu = torch.device("cpu")
    drawn = RandomWeights(shapes, tmp_path, 3, cpu, torch.float32, has_zero_centered_norms=True)
    for name, tensor in names.items():
        if name.endswith("A_log"):
            assert 0.01 <= drawn.read(name).exp().min() < drawn.read(name).exp().max() <= 16.0
        else:
            assert drawn.read(name).equal(tensor), name


def test_random_weights_are_exact_in_the_models_dtype(tmp_path: Path) -> None:
    """Otherwise an engine with float32 weights would begin elsewhere than one that takes its masters from bfloat16."""
    (tmp_path / "config.json").write_text(json.dumps({"initializer_range": 0.5}))

    def drawn(dtype: torch.dtype, name: str) -> torch.Tensor:
        return RandomWeights(SHAPES, tmp_path, 3, torch.device("cpu"), dtype).read(name)

    for name, shape in SHAPES.items():
        rounded, whole = drawn(torch.bfloat16, name), drawn(torch.float32, name)
        assert rounded.dtype == whole.dtype == torch.float32
        assert rounded.shape == shape
        assert rounded.equal(whole.bfloat16().float())
    matrix = drawn(torch.float32, "model.layers.0.mlp.up_proj.weight")
    assert not matrix.equal(matrix.bfloat16().float())
    assert 0.45 < matrix.std() < 0.55
