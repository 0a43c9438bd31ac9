"""Megatron-Core's own models, layers and checkpoints, for the worker processes; nothing here is built by Fivefold.

The configs are written here, from Hugging Face's `config.json`, and share no code with `fivefold.mcore.settings`.
"""

from __future__ import annotations

import json
import multiprocessing
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor, load_tensors_metadata
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules, get_transformer_layer_offset
from megatron_cases import lay_out
from megatron_modules import CentredNorm, KeyNorm, PostNormLinear, QueryNorm, TwoRopes, UnlikeHeads, delta_net

from fivefold.layout.parallel import ParallelLayout
from fivefold.mcore import compat
from fivefold.mcore.parallel import initialize_parallel

TOKENS = torch.tensor([[5, 17, 93, 8, 44, 90, 3, 61]])
PADDED_VOCAB = 104
EMBEDDING = "embedding.word_embeddings.weight"


def build(folder: Path, layout: ParallelLayout, te_names: bool) -> GPTModel:
    """Return the model of a Hugging Face config, with layers of Megatron-Core's local spec and random weights.

    Its vocabulary is padded.

    Args:
        folder: the config's folder.
        layout: the layout of Megatron-Core's groups.
        te_names: name the norms as TransformerEngine's spec does.
    """
    config = _language_config(folder)
    spec_config = _config(config, layout)
    spec = get_gpt_decoder_block_spec(spec_config, use_transformer_engine=False)
    # Layers that are alike share their specs.
    spec.layer_specs = [deepcopy(layer) for layer in spec.layer_specs]
    first = get_transformer_layer_offset(spec_config)
    for number, layer in enumerate(spec.layer_specs, first):
        _adapt(layer.submodules, config, number, te_names)
    if _is_centred(config):
        spec.layer_norm = CentredNorm
    torch.manual_seed(7)
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    model = GPTModel(
        spec_config,
        spec,
        vocab_size=PADDED_VOCAB,
        max_sequence_length=128,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
        position_embedding_type="yarn" if config["model_type"] == "gpt_oss" else "rope",
        rotary_base=rope["rope_theta"],
        rotary_percent=rope.get("partial_rotary_factor", 1.0),
        seq_len_interpolation_factor=rope["factor"] if rope["rope_type"] == "linear" else None,
    )
    for name, parameter in model.named_parameters():
        _draw(name, parameter.data, config)
    if config["model_type"] == "gemma3_text" and model.pre_process:
        model.embedding.register_forward_hook(lambda _module, _args, output: output * config["hidden_size"] ** 0.5)
    return model


def _draw(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> None:
    """Draw at scales that separate logits, as `tiny_models`."""
    if name.endswith("A_log"):
        tensor.uniform_(-3.0, 1.5)
    elif name.endswith("conv1d.weight"):
        tensor.normal_(std=0.6)
    elif tensor.ndim == 1 and not name.endswith("bias"):
        tensor.uniform_(*((-0.5, 0.5) if _is_centred(config) else (0.5, 1.5)))
    else:
        tensor.normal_(std=0.12 if _is_centred(config) else 0.2)


def _adapt(layer: TransformerLayerSubmodules, config: dict[str, Any], number: int, te_names: bool) -> None:
    """Give a layer of the local spec the modules and the names that it has with TransformerEngine or Megatron-Bridge.

    Args:
        layer: the layer.
        config: the model's config.
        number: its number in the model.
        te_names: name the norms as TransformerEngine's spec does.
    """
    has_experts, is_delta = _layers_with_experts(config)[number], _delta_layers(config)[number]
    attention = layer.self_attention.submodules
    if "kv_lora_rank" in config:
        attention.core_attention = UnlikeHeads
    if config["model_type"] == "minimax_m2":
        attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm
    if _is_centred(config):
        layer.input_layernorm = layer.pre_mlp_layernorm = attention.q_layernorm = attention.k_layernorm = CentredNorm
    if config["model_type"] == "gemma3_text":
        attention.linear_proj = PostNormLinear
        _with_post_norm(layer)
        theta = config["rope_parameters"]["sliding_attention"]["rope_theta"]
        layer.self_attention.module = TwoRopes
        layer.self_attention.params = {**layer.self_attention.params, "local_theta": theta}
    if is_delta:
        layer.self_attention = delta_net()
    if te_names:
        layer.sharded_state_dict_keys_map = _te_names(is_delta, has_experts, is_latent="kv_lora_rank" in config)


def _with_post_norm(layer: TransformerLayerSubmodules) -> None:
    if isinstance(layer.mlp, partial):
        layer.mlp.keywords["submodules"].linear_fc2 = PostNormLinear
    else:
        layer.mlp.submodules.linear_fc2 = PostNormLinear


def _te_names(is_delta: bool, has_experts: bool, *, is_latent: bool) -> dict[str, str]:
    """Return what TransformerEngine's spec calls the norms that are parts of the linear layers after them."""
    fused = {} if has_experts else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    if is_latent:
        return fused | {
            f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_" for x in ("q", "kv")
        }
    return fused | {"input_layernorm.": f"self_attention.{'in_proj' if is_delta else 'linear_qkv'}.layer_norm_"}


def _language_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config.get("text_config", config)


def _is_centred(config: dict[str, Any]) -> bool:
    return config["model_type"].startswith(("qwen3_next", "qwen3_5", "gemma3"))


def _delta_layers(config: dict[str, Any]) -> list[bool]:
    return [
        "layer_types" in config and config["layer_types"][layer] == "linear_attention"
        for layer in range(config["num_hidden_layers"])
    ]


def _config(config: dict[str, Any], layout: ParallelLayout) -> TransformerConfig:
    heads = config["num_attention_heads"]
    fields: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config.get("intermediate_size", 1),
        "num_attention_heads": heads,
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "layernorm_epsilon": config["rms_norm_eps"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": config["model_type"].startswith("qwen2"),
        "qk_layernorm": config["model_type"].startswith(("qwen3", "deepseek", "minimax", "gemma3")),
        "layernorm_zero_centered_gamma": _is_centred(config),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "pipeline_dtype": torch.float32,
        "expert_model_parallel_size": layout.ep,
    }
    has_experts = _layers_with_experts(config)
    if any(has_experts):
        fields |= {
            "num_moe_experts": _n_experts(config),
            "moe_ffn_hidden_size": config.get("moe_intermediate_size") or config["intermediate_size"],
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_router_pre_softmax": not config.get("norm_topk_prob", config["model_type"].startswith("qwen3_5")),
            "moe_router_load_balancing_type": "none",
            "moe_shared_expert_intermediate_size": config.get("shared_expert_intermediate_size"),
            "moe_shared_expert_gate": "shared_expert_intermediate_size" in config,
            "moe_token_dispatcher_type": "allgather",
        }
    if "n_shared_experts" in config:
        fields["moe_shared_expert_intermediate_size"] = config["n_shared_experts"] * config["moe_intermediate_size"]
        fields["moe_router_topk_scaling_factor"] = config["routed_scaling_factor"]
    if config["model_type"] in ("deepseek_v3", "minimax_m2"):
        fields |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    if config["model_type"] == "deepseek_v3":
        fields |= {
            "moe_router_num_groups": config["n_group"],
            "moe_router_group_topk": config["topk_group"],
        }
    if len(set(has_experts)) > 1:
        fields["moe_layer_freq"] = [int(has) for has in has_experts]
    if any(_delta_layers(config)):
        fields |= _delta_fields(config)
    if config["model_type"] == "gemma3_text":
        fields |= _gemma_fields(config)
    if config["model_type"] == "gpt_oss":
        fields |= _gpt_oss_fields(config)
    if "kv_lora_rank" in config:
        return MLATransformerConfig(**fields, **_latent_fields(config), **_yarn_fields(config["rope_parameters"]))
    found = TransformerConfig(**fields)
    if config["model_type"] == "gpt_oss":
        vars(found).update(_gpt_oss_positions(config["rope_parameters"]))
    return found


def _delta_fields(config: dict[str, Any]) -> dict[str, Any]:
    sizes = ("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads")
    return {name: config[name] for name in (*sizes, "linear_conv_kernel_dim")} | {
        "attention_output_gate": True,
        "linear_attention_freq": [int(is_delta) for is_delta in _delta_layers(config)],
        "deterministic_mode": True,
    }


def _gemma_fields(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "activation_func": partial(F.gelu, approximate="tanh"),
        "softmax_scale": config["query_pre_attn_scalar"] ** -0.5,
        "window_size": (config["sliding_window"] - 1, 0),
        "window_attn_skip_freq": [int(kind == "sliding_attention") for kind in config["layer_types"]],
    }


def _gpt_oss_fields(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "moe_router_pre_softmax": False,
        "softmax_type": "learnable",
        "window_size": (config["sliding_window"] - 1, 0),
        "window_attn_skip_freq": 2,
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": config["swiglu_limit"],
    }


def _gpt_oss_positions(rope: dict[str, Any]) -> dict[str, Any]:
    """Return what Megatron-Core reads of a config, though it is none of its fields."""
    return {
        "yarn_rotary_scaling_factor": rope["factor"],
        "yarn_original_max_position_embeddings": rope["original_max_position_embeddings"],
        "yarn_beta_fast": rope["beta_fast"],
        "yarn_beta_slow": 1.0,
        "yarn_mscale": rope.get("mscale"),
        "yarn_mscale_all_dim": rope.get("mscale_all_dim"),
        "yarn_correction_range_round_to_int": rope["truncate"],
    }


def _latent_fields(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "q_lora_rank": config["q_lora_rank"],
        "kv_lora_rank": config["kv_lora_rank"],
        "qk_head_dim": config["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": config["qk_rope_head_dim"],
        "v_head_dim": config["v_head_dim"],
    }


def _yarn_fields(rope: dict[str, Any]) -> dict[str, Any]:
    names = ("original_max_position_embeddings", "beta_fast", "mscale", "mscale_all_dim")
    own = {"rope_type": "yarn", "rotary_base": rope["rope_theta"], "rotary_scaling_factor": rope["factor"]}
    return own | {name: rope[name] for name in names}


def _layers_with_experts(config: dict[str, Any]) -> list[bool]:
    dense = config.get("mlp_only_layers") or range(config.get("first_k_dense_replace", 0))
    return [_n_experts(config) > 0 and layer not in dense for layer in range(config["num_hidden_layers"])]


def _n_experts(config: dict[str, Any]) -> int:
    """Return the number of experts, whose key depends on the family and on the release of transformers."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((config[key] for key in keys if key in config), 0)


def _logits(model: GPTModel) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS, torch.arange(TOKENS.shape[1])[None], None)
    return logits[0]


def _enter(layout: str) -> ParallelLayout:
    compat.prepare()
    # It is true without TransformerEngine too, because the module that defines its layers is there without them.
    multi_latent_attention.HAVE_TE = False
    parsed = lay_out(layout)
    initialize_parallel(parsed, 0, 60.0)
    return parsed


def load(folder: Path, checkpoint: Path, metadata: dict[str, Any], te_names: bool, layout: str) -> torch.Tensor:
    """In a worker: load a checkpoint as Megatron-Core does, which must have all keys of the model.

    It must have no others, either, but for the states of TransformerEngine's modules. Returns the model's logits.
    """
    model = build(folder, _enter(layout), te_names)
    _fill(model, checkpoint, metadata, te_names)
    return _logits(model)


def _fill(model: GPTModel, checkpoint: Path, metadata: dict[str, Any], te_names: bool) -> None:
    named = model.sharded_state_dict(metadata=metadata)
    apply_factories(named)
    keys = {value.key for value in nested_values(named) if isinstance(value, ShardedTensor)}
    assert model.config.pipeline_model_parallel_size > 1 or load_tensors_metadata(str(checkpoint)).keys() == keys
    strict = "assume_ok_unexpected" if te_names else "raise_all"
    state = dist_checkpointing.load(model.sharded_state_dict(metadata=metadata), str(checkpoint), strict=strict)
    # Megatron-LM reorders queries, keys and values of a checkpoint without a version.
    assert state.pop("checkpoint_version") >= 2.0
    state.pop("iteration")
    model.load_state_dict(state)


def save(
    folder: Path, checkpoint: Path, metadata: dict[str, Any], te_names: bool, layout: str, prefix: str
) -> torch.Tensor:
    """In a worker: save a random model as Megatron-Core does, with a tensor of an optimizer. Returns its logits."""
    # Megatron-Core writes in processes of its own, which a daemon may not start.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    model = build(folder, _enter(layout), te_names)
    _write(model, checkpoint, metadata, prefix)
    return _logits(model)


def save_again(folder: Path, checkpoint: Path, out: Path, metadata: dict[str, Any], layout: str) -> None:
    """In a worker: load a checkpoint into a model with TransformerEngine's names, and save it."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    model = build(folder, _enter(layout), te_names=True)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    _fill(model, checkpoint, {}, te_names=True)
    _write(model, out, metadata, "module.")


def _write(model: GPTModel, checkpoint: Path, metadata: dict[str, Any], prefix: str) -> None:
    state = model.sharded_state_dict(prefix=prefix, metadata=metadata)
    moment = ShardedTensor.from_rank_offsets(f"optimizer.state.exp_avg.{prefix}{EMBEDDING}", torch.ones(3))
    # Megatron-Core would start a process for its queue that imports all libraries anew, and would outlive this worker,
    # which ends without cleaning up.
    with multiprocessing.get_context("fork").Manager() as manager:
        filesystem_async._results_queue = manager.Queue()
        dist_checkpointing.save({**state, "moment": moment}, str(checkpoint), validate_access_integrity=False)
    filesystem_async._results_queue = None
