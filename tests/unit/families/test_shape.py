"""Model shapes against transformers: its configuration objects, and the parameters that its models have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fivefold.families.shape import ModelShape, RopeScaling, load_shape

SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": 101,
    "max_position_embeddings": 256,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    "qwen3_moe": {**MOE, "head_dim": 16, "decoder_sparse_step": 2},
}


def raw(family: str, **changes: Any) -> dict[str, Any]:
    """A `config.json` as transformers 4 writes it."""
    return {"model_type": family, **SIZES, **FAMILIES[family], **changes}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_transformers_model(family: str, tied: bool) -> None:
    config = raw(family, tie_word_embeddings=tied)
    hf_config = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    shape = ModelShape.from_hf(config)
    assert shape.n_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.tied_embeddings == tied
    names = dict(model.named_parameters())
    assert shape.qkv_bias == any(name.endswith("q_proj.bias") for name in names)
    assert shape.qk_norm == any(name.endswith("q_norm.weight") for name in names)
    routed = [any(name.startswith(f"model.layers.{i}.mlp.gate.") for name in names) for i in range(4)]
    assert list(shape.moe_layers) == routed
    unused = shape.n_moe_layers * (shape.n_experts - shape.top_k) * shape.expert_parameters
    assert shape.n_active_parameters == shape.n_parameters - unused


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_configurations_of_this_transformers_give_the_same_shape(family: str, tmp_path: Path) -> None:
    config = raw(family, rope_theta=5e5, rms_norm_eps=1e-5, tie_word_embeddings=True, norm_topk_prob=True)
    AutoConfig.for_model(**config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in saved, "this transformers nests theta in rope_parameters"
    assert load_shape(tmp_path) == ModelShape.from_hf(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_left_out_mean_what_transformers_makes_of_them(family: str) -> None:
    config = raw(family)
    hf_config = AutoConfig.for_model(**config)
    shape = ModelShape.from_hf(config)
    assert shape.rms_norm_eps == hf_config.rms_norm_eps
    assert shape.rope_theta == hf_config.rope_parameters["rope_theta"]
    assert shape.tied_embeddings == hf_config.tie_word_embeddings
    if shape.is_moe:
        assert shape.norm_topk_prob == (family == "mixtral" or hf_config.norm_topk_prob)


def test_published_sizes() -> None:
    """Qwen3-30B-A3B: its model card says 30.5B parameters, 3.3B of them active."""
    shape = ModelShape.from_hf(
        {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "norm_topk_prob": True,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
        }
    )
    assert round(shape.n_parameters / 1e9, 1) == 30.5
    assert abs(shape.n_active_parameters / 1e9 - 3.3) < 0.1


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeScaling("llama3", 8.0, 1.0, 4.0, 128),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            RopeScaling("llama3", 8.0, 1.0, 4.0, 128),
        ),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}, RopeScaling("linear", 2.0)),
        ({"rope_theta": 5e5, "rope_scaling": None}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500000}}, None),
    ],
)
def test_rope_in_both_spellings(changes: dict[str, Any], expected: RopeScaling | None) -> None:
    shape = ModelShape.from_hf(raw("llama", **changes))
    assert shape.rope_theta == 5e5
    assert shape.rope_scaling == expected


def test_null_kv_heads_mean_one_for_each_query_head() -> None:
    assert ModelShape.from_hf(raw("qwen2", num_key_value_heads=None)).n_kv_heads == 6
    old = raw("llama")
    del old["num_key_value_heads"]
    assert ModelShape.from_hf(old).n_kv_heads == 6


def test_unused_sliding_windows_are_ignored() -> None:
    unused = {"sliding_window": 32, "use_sliding_window": False, "max_window_layers": 2}
    assert ModelShape.from_hf(raw("qwen2", **unused)) == ModelShape.from_hf(raw("qwen2"))
    above_all = {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 4}
    assert ModelShape.from_hf(raw("qwen3", **above_all)) == ModelShape.from_hf(raw("qwen3"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (raw("llama", model_type="gpt2"), "model_type is 'gpt2'"),
        ({}, "model_type is None"),
        (raw("mixtral", sliding_window=64), "sliding_window=64"),
        (raw("qwen3", sliding_window=64, use_sliding_window=True, max_window_layers=2), "sliding_window=64"),
        (raw("qwen2", sliding_window=64, layer_types=["full_attention", "sliding_attention"] * 2), "sliding_window=64"),
        (raw("qwen3_moe", sliding_window=64, use_sliding_window=True), "sliding_window=64"),
        (raw("llama", attention_bias=True), "attention_bias"),
        (raw("qwen3", attention_bias=True), "attention_bias"),
        (raw("llama", mlp_bias=True), "mlp_bias"),
        (raw("qwen3", hidden_act="gelu"), "hidden_act='gelu'"),
        (raw("llama", rope_scaling={"rope_type": "yarn", "factor": 4.0}), "'yarn'"),
        (raw("llama", rope_scaling={"rope_type": "llama3", "factor": 8.0}), "needs low_freq_factor, high_freq_factor"),
        (raw("llama", partial_rotary_factor=0.5), "partial_rotary_factor"),
        (raw("qwen3", rope_parameters={"full_attention": {"rope_theta": 1e6}}), "differ by layer type"),
        (raw("qwen2", num_key_value_heads=4), "not a multiple of num_key_value_heads=4"),
        (raw("qwen2", hidden_size=50), "hidden_size=50"),
        (raw("llama", head_dim=7), "must be even"),
        (raw("qwen3_moe", num_experts_per_tok=7), "exceeds the 6 experts"),
        (raw("qwen3_moe", num_local_experts=8), "num_experts=6 and num_local_experts=8"),
        (raw("llama", num_hidden_layers="4"), "num_hidden_layers='4'"),
        (raw("llama", num_hidden_layers=0), "num_hidden_layers=0"),
        (raw("llama", rms_norm_eps="tiny"), "rms_norm_eps='tiny'"),
        (raw("llama", tie_word_embeddings=1), "tie_word_embeddings=1"),
        (raw("qwen3_moe", mlp_only_layers=3), "mlp_only_layers=3; it must be a list of whole numbers"),
        (raw("qwen3_moe", mlp_only_layers=[[1]]), "it must be a list of whole numbers"),
        (raw("llama", rope_scaling="a"), "rope_scaling='a'; it must be an object or null"),
        (raw("llama", rope_parameters=[1]), "it must be an object or null"),
        (raw("qwen3", layer_types=1), "layer_types=1; it must be a list of texts"),
        ({key: value for key, value in raw("qwen2").items() if key != "hidden_size"}, "has no hidden_size"),
        (
            {key: value for key, value in raw("qwen3").items() if key != "num_key_value_heads"},
            "has no num_key_value_heads",
        ),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelShape.from_hf(config)


def test_folders_without_a_usable_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        load_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load_shape(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list"):
        load_shape(tmp_path)
