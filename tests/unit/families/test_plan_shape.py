"""Shapes for planning: published sizes, transformers' own DeepSeek-V3, and names that people write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fivefold.families.flops import training_flops
from fivefold.families.plan_shape import SHAPES, PlanShape, find_shape, read_shape
from fivefold.planning.step_flops import training_parts

# Billions of parameters, and of those that a token visits, from the model cards and papers.
PUBLISHED = {
    "Qwen2.5-0.5B": (0.49, 0.49),
    "Qwen2.5-1.5B": (1.54, 1.54),
    "Qwen2.5-3B": (3.09, 3.09),
    "Qwen2.5-7B": (7.61, 7.61),
    "Qwen2.5-14B": (14.7, 14.7),
    "Qwen2.5-32B": (32.5, 32.5),
    "Qwen2.5-72B": (72.7, 72.7),
    "Qwen3-0.6B": (0.6, 0.6),
    "Qwen3-1.7B": (1.7, 1.7),
    "Qwen3-4B": (4.0, 4.0),
    "Qwen3-8B": (8.2, 8.2),
    "Qwen3-14B": (14.8, 14.8),
    "Qwen3-32B": (32.8, 32.8),
    "Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen3-235B-A22B": (235, 22),
    "Llama-3.1-8B": (8.03, 8.03),
    "Llama-3.1-70B": (70.6, 70.6),
    "Llama-3.1-405B": (405, 405),
    "Mixtral-8x7B": (46.7, 12.9),
    "Mixtral-8x22B": (141, 39),
    "DeepSeek-V3": (671, 37),
}

TINY_LATENT = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "vocab_size": 101,
    "max_position_embeddings": 128,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 2,
    "topk_group": 1,
}


@pytest.mark.parametrize("name", sorted(path.stem for path in SHAPES.glob("*.json")))
def test_shipped_shapes_have_the_published_sizes(name: str) -> None:
    shape = find_shape(name)
    total, active = PUBLISHED[name]
    assert shape.n_parameters / 1e9 == pytest.approx(total, rel=0.015)
    assert shape.n_active_parameters / 1e9 == pytest.approx(active, rel=0.02)


def test_latent_attention_has_the_parameters_of_the_transformers_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LATENT))
    shape = find_shape(str(tmp_path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY_LATENT))
    biases = sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert shape.n_parameters == sum(parameter.numel() for parameter in model.parameters()) + biases
    assert not shape.is_trainable
    # The latent and the shared positional key, for each of three layers.
    assert shape.kv_cache_elements == 3 * (12 + 8)


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Qwen2.5-7B", "Mixtral-8x7B"])
def test_flops_by_part_sum_to_those_of_the_whole(name: str) -> None:
    shape = find_shape(name)
    assert training_parts(shape, 3, 500).total == pytest.approx(training_flops(shape, [500] * 3, 1500))


def test_latent_flops_are_six_for_each_weight_that_multiplies_a_token() -> None:
    shape = find_shape("DeepSeek-V3")
    parts = training_parts(shape, 1, 1000)
    matmuls = parts.total - parts.attention
    embedding = shape.vocab * shape.hidden
    assert matmuls == pytest.approx(6 * 1000 * (shape.n_active_parameters - embedding), rel=1e-4)


@pytest.mark.parametrize("written", ["qwen3-8b", "Qwen/Qwen3-8B", "Qwen3-8B"])
def test_names_are_found_as_people_write_them(written: str) -> None:
    assert find_shape(written).name == "Qwen3-8B"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen2.5-7B"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B"),
        ("Qwen/Qwen3-8B-Base", "Qwen3-8B"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "Mixtral-8x7B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("deepseek-ai/DeepSeek-V3-0324", "DeepSeek-V3"),
        ("deepseek-ai/DeepSeek-V3", "DeepSeek-V3"),
    ],
)
def test_variants_have_the_shape_of_their_model(written: str, name: str) -> None:
    assert find_shape(written).name == name


def test_a_config_file_is_read() -> None:
    file = SHAPES / "Qwen3-8B.json"
    assert find_shape(str(file)) == find_shape("Qwen3-8B")


def test_unknown_names_get_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="did you mean Qwen3-30B-A3B") as error:
        find_shape("Qwen3-30B-A3")
    assert "DeepSeek-V3" in str(error.value)


def test_sizes_that_are_missing_are_named(tmp_path: Path) -> None:
    config = {key: value for key, value in TINY_LATENT.items() if key != "kv_lora_rank"}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="kv_lora_rank=None"):
        read_shape(file, "broken")
    file.write_text("[]")
    read_shape.cache_clear()
    with pytest.raises(ValueError, match="an object"):
        read_shape(file, "broken")


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_numbers_of_latent_models_are_numbers(key: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**TINY_LATENT, key: [1]}))
    read_shape.cache_clear()
    with pytest.raises(ValueError, match=rf"{key}=\[1\]; it must be a number"):
        read_shape(file, "broken")


def test_a_plan_shape_keeps_every_field_of_the_model_shape() -> None:
    shape = find_shape("Mixtral-8x7B")
    assert isinstance(shape, PlanShape)
    assert (shape.family, shape.n_experts, shape.top_k, shape.is_trainable) == ("mixtral", 8, 2, True)
