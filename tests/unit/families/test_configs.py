"""Shapes read from config.json against transformers: its configuration objects and the parameters of its models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from fivefold.families.read import read_shape
from fivefold.families.registry import FAMILIES
from fivefold.families.rope_scaling import RopeScaling
from fivefold.rollout.hf_model import model_class

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
LATENT = {
    "num_key_value_heads": 6,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
INDEXER = {"index_n_heads": 3, "index_head_dim": 10, "index_topk": 100}
DELTA_NET = {
    "head_dim": 16,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 7,
    "full_attention_interval": 3,
}
KEYS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    "qwen3_moe": {**MOE, "head_dim": 16, "decoder_sparse_step": 2},
    "qwen3_next": {**DELTA_NET, **MOE, "shared_expert_intermediate_size": 40},
    "qwen3_vl": {"head_dim": 16},
    "qwen3_vl_moe": {**MOE, "head_dim": 16, "decoder_sparse_step": 2, "moe_intermediate_size": 20},
    "qwen2_5_vl": {},
    "qwen3_5": DELTA_NET,
    "qwen3_5_moe": {**DELTA_NET, **MOE, "shared_expert_intermediate_size": 40},
    "glm4_moe": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 16,
        "n_shared_experts": 2,
        "attention_bias": True,
        "use_qk_norm": True,
        "first_k_dense_replace": 2,
    },
    "minimax_m2": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "rotary_dim": 8},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window_pattern": 3},
    "deepseek_v3": {**LATENT, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 1},
    "glm4_moe_lite": LATENT,
    "deepseek_v32": {**LATENT, **INDEXER, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    "glm_moe_dsa": {**LATENT, **INDEXER, "index_topk_freq": 2, "first_k_dense_replace": 2},
}
NORMALISING = {"mixtral", "minimax_m2", "gpt_oss", "qwen3_5_moe", "qwen3_vl_moe"}
"""Families whose routers scale the weights of the chosen experts in any case."""
SEEING = {"qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl", "qwen3_5", "qwen3_5_moe"}
"""Families whose files describe the language model inside a model that sees images."""


def raw(family: str, **changes: Any) -> dict[str, Any]:
    """Return a `config.json` as transformers 4 writes it."""
    own = {**SIZES, **KEYS[family], **changes}
    if family in SEEING:
        tied = {key: own.pop(key) for key in ("tie_word_embeddings",) if key in own}
        text, vision = {"model_type": f"{family}_text", **own}, {"out_hidden_size": own["hidden_size"]}
        return {"model_type": family, "text_config": text, "vision_config": vision, **tied}
    return {"model_type": family, **own}


def text_config_of(config: dict[str, Any]) -> Any:
    """Return what transformers builds the language model with."""
    text = AutoConfig.for_model(**config).get_text_config()
    if "text_config" in config:  # where a class may have another default than the whole model's
        text.tie_word_embeddings = config.get("tie_word_embeddings", False)
    return text


def n_offsets(model: torch.nn.Module) -> int:
    """Return the number of offsets of experts' scores, which transformers keeps as buffers."""
    return sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias"))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_transformers_model(family: str, tied: bool) -> None:
    config = raw(family, tie_word_embeddings=tied)
    hf_config = text_config_of(config)
    with torch.device("meta"):
        model = model_class(hf_config).from_config(hf_config)
    shape = read_shape(config)
    assert shape.n_parameters == sum(parameter.numel() for parameter in model.parameters()) + n_offsets(model)
    assert shape.tied_embeddings == tied
    names = dict(model.named_parameters())
    assert shape.qkv_bias == any(name.endswith("q_proj.bias") for name in names)
    assert shape.qk_norm == any(name.endswith("q_norm.weight") for name in names)
    frequencies = [buffer for name, buffer in model.model.rotary_emb.named_buffers() if name.endswith("inv_freq")]
    assert {2 * len(each) for each in frequencies} == {shape.rotated_channels}
    routed = [any(name.startswith(f"model.layers.{i}.mlp.experts.") for name in names) for i in range(4)]
    assert list(shape.moe_layers) == routed
    unused = shape.n_moe_layers * (shape.n_experts - shape.top_k) * shape.expert_parameters
    assert shape.n_active_parameters == shape.n_parameters - unused


@pytest.mark.parametrize("family", sorted(SEEING))
def test_vision_towers_have_the_parameters_and_tokens_of_the_transformers_model(family: str) -> None:
    config = raw(family)
    whole = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(whole)
    vision = read_shape(config).vision
    assert vision is not None
    assert vision.n_parameters == sum(parameter.numel() for parameter in model.model.visual.parameters())
    assert vision.marker == (whole.vision_start_token_id, whole.image_token_id, whole.vision_end_token_id)
    assert vision.video_token == whole.video_token_id
    assert vision.n_deepstack == len(getattr(whole.vision_config, "deepstack_visual_indexes", ()))
    assert vision.rope_sections == tuple(model.model.language_model.rotary_emb.mrope_section)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"vision_config": {"out_hidden_size": 7}}, "out_hidden_size=7, and text_config hidden_size=48"),
        ({"vision_config": {"out_hidden_size": 48, "depth": 0}}, "depth=0"),
        ({"image_token_id": "x"}, "image_token_id='x'"),
    ],
)
def test_vision_towers_that_cannot_be_are_refused(keys: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        read_shape(raw("qwen3_vl") | keys)


def test_published_files_of_qwen2_5_vl_have_the_language_model_at_the_top() -> None:
    nested = raw("qwen2_5_vl", rope_theta=1e6, rope_scaling={"type": "mrope", "mrope_section": [2, 2, 2]})
    vision = {"in_chans": 3, "hidden_size": 1280, "depth": 4, **nested["vision_config"]}
    text = {key: value for key, value in nested["text_config"].items() if key != "model_type"}
    flat = {"model_type": "qwen2_5_vl", **text, "vision_config": vision}
    shape = read_shape(flat)
    assert shape == read_shape({**nested, "vision_config": vision})
    assert shape.vision is not None
    assert (shape.vision.rope_sections, shape.vision.hidden, shape.rope_scaling) == ((2, 2, 2), 1280, None)
    built = AutoConfig.for_model(**flat)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(built)
    n_tower = sum(parameter.numel() for parameter in model.model.visual.parameters())
    assert shape.n_parameters + n_tower == sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(ValueError, match=r"head_dim=7 is not supported"):
        read_shape({**flat, "head_dim": 7})


def test_experts_of_sizes_that_leave_their_direction_open_are_refused() -> None:
    for width in (24, 48):
        with pytest.raises(ValueError, match=rf"hidden_size=48 is once or twice moe_intermediate_size={width}"):
            read_shape(raw("qwen3_vl_moe", moe_intermediate_size=width))


def test_whole_models_say_whether_the_output_layer_is_the_embedding() -> None:
    config = raw("qwen3_vl_moe", tie_word_embeddings=False)
    config["text_config"]["tie_word_embeddings"] = True  # as transformers writes it, where no model is built so
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config))
    assert model.lm_head.weight is not model.model.language_model.embed_tokens.weight
    assert not read_shape(config).tied_embeddings


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_configurations_of_this_transformers_give_the_same_shape(family: str, tmp_path: Path) -> None:
    normalises = family != "deepseek_v2"  # whose routers never do
    config = raw(family, rope_theta=5e5, rms_norm_eps=1e-5, tie_word_embeddings=True, norm_topk_prob=normalises)
    AutoConfig.for_model(**config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in saved.get("text_config", saved), "this transformers nests theta in rope_parameters"
    assert read_shape(saved) == read_shape(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_left_out_mean_what_transformers_makes_of_them(family: str) -> None:
    config = raw(family)
    hf_config = text_config_of(config)
    shape = read_shape(config)
    assert shape.rms_norm_eps == hf_config.rms_norm_eps
    rope = hf_config.rope_parameters
    assert shape.rope_theta == rope.get("full_attention", rope)["rope_theta"]
    assert shape.local_rope_theta == rope.get("sliding_attention", {}).get("rope_theta")
    assert shape.tied_embeddings == hf_config.tie_word_embeddings
    if shape.is_moe:
        assert shape.norm_topk_prob == (family in NORMALISING or hf_config.norm_topk_prob)


@pytest.mark.parametrize(
    ("family", "keys", "expected"),
    [
        ("qwen2_moe", {"mlp_only_layers": [0, 3]}, [0, 1, 1, 0]),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [0, 1, 0, 0]),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}, [0, 0, 0, 0]),
        ("glm4_moe", {"first_k_dense_replace": 3}, [0, 0, 0, 1]),
        ("deepseek_v2", {"first_k_dense_replace": 0}, [1, 1, 1, 1]),
        ("deepseek_v3", {"first_k_dense_replace": 9}, [0, 0, 0, 0]),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "dense", "sparse"]}, [1, 0, 0, 1]),
        ("glm4_moe_lite", {"first_k_dense_replace": 1}, [0, 1, 1, 1]),
        ("glm4_moe_lite", {"mlp_layer_types": None}, [0, 1, 1, 1]),
        ("deepseek_v32", {"first_k_dense_replace": 2}, [0, 0, 1, 1]),
        ("glm_moe_dsa", {"first_k_dense_replace": 3, "mlp_layer_types": ["dense"] * 3 + ["sparse"]}, [0, 0, 0, 1]),
    ],
)
def test_layers_with_experts_are_those_of_the_transformers_model(
    family: str, keys: dict[str, Any], expected: list[int]
) -> None:
    config = raw(family, **keys)
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).model.layers
    assert [hasattr(layer.mlp, "experts") for layer in layers] == [bool(each) for each in expected]
    assert read_shape(config).moe_layers == tuple(map(bool, expected))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [1, 1, 1, 1]),
        ({"index_topk_freq": 2}, [1, 1, 0, 1]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [1, 0, 1, 0]),
        ({"index_topk_pattern": "FSSF"}, [1, 0, 0, 1]),
        ({"index_topk_pattern": ["full", "shared", "full", "full"]}, [1, 0, 1, 1]),
        ({"index_topk_pattern": "FFFF", "indexer_types": ["full", "full", "shared", "shared"]}, [1, 1, 0, 0]),
    ],
)
def test_layers_with_indexers_are_those_of_the_transformers_model(keys: dict[str, Any], expected: list[int]) -> None:
    config = raw("glm_moe_dsa", index_topk_freq=1) | keys
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).model.layers
    assert [layer.self_attn.indexer is not None for layer in layers] == [bool(each) for each in expected]
    indexer = read_shape(config).indexer
    assert indexer is not None
    assert indexer.layers == tuple(map(bool, expected))


def test_sequences_are_as_long_as_attention_is_dense() -> None:
    shape = read_shape(raw("deepseek_v32", max_position_embeddings=4096))
    assert (shape.most_tokens, shape.max_positions) == (100, 4096)
    assert "up to index_topk=100 tokens" in shape.limit
    short = read_shape(raw("deepseek_v32", max_position_embeddings=64))
    assert (short.most_tokens, short.limit) == (64, "has 64 positions")


def test_generation_with_latent_attention_keeps_the_latents() -> None:
    shape = read_shape(raw("deepseek_v3"))
    # The latent and the positional key that all heads share, for each of four layers.
    assert shape.kv_cache_elements(10) == 10 * 4 * (12 + 8)


def test_generation_with_windows_keeps_the_tokens_in_them() -> None:
    shape = read_shape(raw("gpt_oss"))
    assert shape.layer_kinds == ("window", "full") * 2
    # Keys and values of two heads of 16 channels; the window has 128 tokens.
    assert shape.kv_cache_elements(100) == 4 * 100 * 2 * 2 * 16
    assert shape.kv_cache_elements(1000) == 2 * (1000 + 128) * 2 * 2 * 16


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (raw("mistral", sliding_window=64), (64, (True,) * 4)),
        ({key: value for key, value in raw("mistral").items() if key != "sliding_window"}, (4096, (True,) * 4)),
        (raw("mistral"), (None, ())),
        (raw("mixtral", sliding_window=64), (64, (True,) * 4)),
        (raw("gpt_oss", sliding_window=9), (9, (True, False, True, False))),
        (raw("gemma3_text"), (4096, (True, True, False, True))),
        (raw("gpt_oss", layer_types=["full_attention"] * 4), (None, ())),
        (raw("gpt_oss", layer_types=["full_attention", "sliding_attention"] * 2), (128, (False, True) * 2)),
    ],
)
def test_layers_with_a_window_are_those_of_the_transformers_model(
    config: dict[str, Any], expected: tuple[int | None, tuple[bool, ...]]
) -> None:
    shape = read_shape(config)
    assert (shape.window, shape.window_layers) == expected
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    for layer, module in enumerate(model.model.layers):
        own = getattr(module.self_attn, "sliding_window", model.config.sliding_window)
        assert own == (shape.window if shape.layer_kinds[layer] == "window" else None)


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
def test_rotary_positions_are_read_in_both_spellings(changes: dict[str, Any], expected: RopeScaling | None) -> None:
    shape = read_shape(raw("llama", **changes))
    assert shape.rope_theta == 5e5
    assert shape.rope_scaling == expected


def test_null_kv_heads_mean_one_for_each_query_head() -> None:
    assert read_shape(raw("qwen2", num_key_value_heads=None)).n_kv_heads == 6
    old = raw("llama")
    del old["num_key_value_heads"]
    assert read_shape(old).n_kv_heads == 6


@pytest.mark.parametrize(
    "unused",
    [
        {"use_sliding_window": False, "max_window_layers": 2},
        {"use_sliding_window": True, "max_window_layers": 4},
        {"use_sliding_window": True, "max_window_layers": 4, "layer_types": ["full_attention"] * 4},
    ],
)
def test_sliding_windows_that_no_layer_uses_are_ignored(unused: dict[str, Any]) -> None:
    config = raw("qwen2", sliding_window=32, **unused)
    assert set(AutoConfig.for_model(**config).layer_types) == {"full_attention"}
    assert read_shape(config) == read_shape(raw("qwen2"))


def test_a_list_of_full_attention_rules_out_a_window_in_qwen2_moe() -> None:
    config = raw("qwen2_moe", use_sliding_window=True, sliding_window=32, layer_types=["full_attention"] * 4)
    assert set(AutoConfig.for_model(**config).layer_types) == {"full_attention"}
    assert read_shape(config) == read_shape(raw("qwen2_moe"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (raw("llama", model_type="gpt2"), "model_type is 'gpt2'"),
        (raw("deepseek_v3", model_type="kimi_k2"), "model_type is 'kimi_k2'.*write deepseek_v3"),
        (raw("gemma3_text", model_type="gemma3"), "model_type is 'gemma3'.*only models of text alone"),
        ({}, "model_type is None"),
        ({"model_type": ["llama"]}, r"model_type is \['llama'\]"),
        (raw("mistral", sliding_window=64, layer_types=["sliding_attention", "full_attention"] * 2), "differs from"),
        (raw("mistral", sliding_window=None, layer_types=["sliding_attention"] * 4), "sliding_window=None tokens"),
        (raw("gpt_oss", layer_types=["sliding_attention"] * 3), "layer_types has 3 entries"),
        (raw("gpt_oss", layer_types=["chunked_attention"] * 4), "layer_types has chunked_attention"),
        (raw("gpt_oss", swiglu_alpha=1.5), "swiglu_alpha=1.5 is not supported"),
        (raw("gemma3_text", hidden_activation="silu"), "hidden_activation='silu' is not supported; .* gelu_pytorch"),
        (raw("gemma3_text", final_logit_softcapping=30.0), "final_logit_softcapping=30.0 is not supported; it must be"),
        (raw("gemma3_text", use_bidirectional_attention=True), "use_bidirectional_attention=true is not supported"),
        (
            raw("gemma3_text", rope_parameters={"sliding_attention": {"rope_type": "linear", "factor": 2.0}}),
            "rope type 'linear' of sliding_attention is not supported",
        ),
        (raw("gemma3_text", rope_local_base_freq=0), "rope_local_base_freq=0; it must be greater than 0"),
        (raw("qwen3", sliding_window=64, use_sliding_window=True, max_window_layers=2), "sliding_window=64"),
        (raw("qwen2", sliding_window=64, layer_types=["full_attention", "sliding_attention"] * 2), "sliding_window=64"),
        (raw("qwen3_moe", sliding_window=64, use_sliding_window=True), "sliding_window=64"),
        (raw("mixtral", sliding_window=0), "sliding_window=0"),
        (raw("qwen3", layer_types=["chunked_attention"] * 4), "layer_types has chunked_attention"),
        (raw("mixtral", router_jitter_noise=0.1), "router_jitter_noise=0.1 is not supported.*set it to 0"),
        (raw("minimax_m2", qk_norm_type="per_head"), "qk_norm_type='per_head' is not supported"),
        (raw("minimax_m2", rotary_dim=7), "rotary_dim=7 must be an even number of a head's 16 channels"),
        (raw("llama", attention_bias=True), "attention_bias"),
        (raw("qwen3", attention_bias=True), "attention_bias"),
        (raw("llama", mlp_bias=True), "mlp_bias"),
        (raw("llama", attention_dropout=0.1), "attention_dropout=0.1 is not supported.*set it to 0"),
        (raw("qwen2_moe", shared_expert_intermediate_size=0), "shared_expert_intermediate_size=0.*at least 1"),
        (raw("qwen2_moe", use_sliding_window=True), "sliding_window=4096"),
        (raw("qwen3", use_sliding_window=True, max_window_layers=2), "sliding_window=4096"),
        (raw("qwen3", hidden_act="gelu"), "hidden_act='gelu'"),
        (raw("llama", rope_scaling={"rope_type": "dynamic", "factor": 4.0}), "'dynamic'"),
        (raw("deepseek_v3", scoring_func="softmax"), "scoring_func='softmax' is not supported; it must be 'sigmoid'"),
        (raw("deepseek_v3", n_group=8, topk_group=2), "n_group=8 must divide the 8 experts into groups of at least 2"),
        (raw("deepseek_v3", moe_layer_freq=2), "moe_layer_freq=2"),
        (raw("deepseek_v3", num_key_value_heads=2), "num_key_value_heads=2 must be num_attention_heads=6"),
        (raw("deepseek_v3", qk_rope_head_dim=7), "qk_rope_head_dim=7 must be even"),
        (raw("deepseek_v2", norm_topk_prob=True), "norm_topk_prob=true is not supported"),
        (raw("deepseek_v2", topk_method="noaux_tc"), "topk_method='noaux_tc' is not supported; it must be 'greedy' or"),
        (
            raw("deepseek_v2", topk_method="group_limited_greedy", n_group=3, topk_group=1),
            "n_group=3 must divide the 8",
        ),
        (raw("deepseek_v2", rope_interleave=False), "rope_interleave=false is not supported; it must be true"),
        (raw("deepseek_v2", scoring_func="sigmoid"), "scoring_func='sigmoid' is not supported; it must be 'softmax'"),
        (raw("glm4_moe_lite", mlp_layer_types=["dense"]), "mlp_layer_types has 1 entries"),
        (raw("glm4_moe_lite", mlp_layer_types=["dense", "moe"] * 2), "mlp_layer_types has moe; a layer is dense or"),
        (raw("glm4_moe_lite", first_k_dense_replace=2), "first_k_dense_replace=2 is not what transformers computes"),
        (
            raw("glm4_moe_lite", first_k_dense_replace=1, mlp_layer_types=["dense", "sparse"] * 2),
            "list the layers in mlp_layer_types, and drop first_k_dense_replace",
        ),
        (raw("deepseek_v32", q_lora_rank=None), "q_lora_rank=None"),
        (raw("deepseek_v32", rope_interleave=False), "rope_interleave=false is not supported"),
        (
            raw("glm_moe_dsa", mlp_layer_types=["dense"] * 4),
            "first_k_dense_replace=2, which servers read, differs from mlp_layer_types",
        ),
        (raw("glm_moe_dsa", indexer_types=["full"] * 3), "they must be one `full` or `shared` a layer"),
        (raw("glm_moe_dsa", index_topk_pattern="SFFF"), "the first layer's full"),
        (raw("glm_moe_dsa", index_topk_pattern="FFXF"), "full, full, X, full"),
        (raw("llama", rope_scaling={"rope_type": "llama3", "factor": 8.0}), "needs low_freq_factor, high_freq_factor"),
        (raw("llama", partial_rotary_factor=0.5), "partial_rotary_factor"),
        (raw("qwen3", rope_parameters={"full_attention": {"rope_theta": 1e6}}), "differ by layer type"),
        (raw("qwen2", num_key_value_heads=4), "not a multiple of num_key_value_heads=4"),
        (raw("qwen2", hidden_size=50), "hidden_size=50"),
        (raw("llama", head_dim=7), "must be even"),
        (raw("glm4_moe", norm_topk_prob=False), "norm_topk_prob=false is not supported"),
        (raw("glm4_moe", n_group=2, topk_group=3), "topk_group=3 be groups that have the 2 experts of a token"),
        (raw("glm4_moe", partial_rotary_factor=0.1), "turns 1 of a head's 16 channels"),
        (raw("qwen3_moe", num_experts_per_tok=7), "exceeds the 6 experts"),
        (raw("qwen3_moe", num_local_experts=8), "num_experts=6 and num_local_experts=8"),
        (raw("llama", num_hidden_layers="4"), "num_hidden_layers='4'"),
        (raw("llama", num_hidden_layers=0), "num_hidden_layers=0"),
        (raw("llama", num_hidden_layers=10**9), "num_hidden_layers=1000000000; it must be at most 10,000"),
        (raw("llama", hidden_size=10**30), "it must be at most 1,000,000,000"),
        (raw("llama", rms_norm_eps="tiny"), "rms_norm_eps='tiny'"),
        (raw("llama", rope_theta=float("nan")), "rope_theta=nan; it must be a number"),
        (raw("llama", rope_theta=10**400), "rope_theta=1000.*it must be a number"),
        (raw("llama", rope_theta=0), "rope_theta=0; it must be greater than 0"),
        (raw("llama", rope_scaling={"rope_type": "linear", "factor": 0}), "factor=0; it must be greater than 0"),
        (raw("llama", rope_scaling={"rope_type": ["linear"], "factor": 2}), r"rope type \['linear'\] is not supported"),
        (raw("llama", tie_word_embeddings=1), "tie_word_embeddings=1"),
        (raw("qwen3_moe", mlp_only_layers=[[1]]), "it must be a list of whole numbers"),
        (raw("llama", rope_scaling="a"), "rope_scaling='a'; it must be an object or null"),
        (raw("qwen3", layer_types=1), "layer_types=1; it must be a list of texts"),
        ({key: value for key, value in raw("qwen2").items() if key != "hidden_size"}, "has no hidden_size"),
        (
            {key: value for key, value in raw("qwen3").items() if key != "num_key_value_heads"},
            "has no num_key_value_heads",
        ),
        (raw("deepseek_v3", kv_lora_rank=None), "kv_lora_rank=None"),
        (raw("deepseek_v3", rms_norm_eps=[1]), r"rms_norm_eps=\[1\]; it must be a number"),
    ],
)
def test_an_error_names_what_is_not_supported(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_shape(config)
