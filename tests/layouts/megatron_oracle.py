"""Megatron-Core's own models, layers and checkpoints, for the worker processes; nothing here is built by Fivefold.

The configs are written here, from Hugging Face's `config.json`, and share no code with `fivefold.mcore.settings`.
"""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron_cases import lay_out

from fivefold.layout.parallel import ParallelLayout
from fivefold.mcore import compat
from fivefold.mcore.parallel import initialize_parallel

TOKENS = torch.tensor([[5, 17, 93, 8, 44, 90, 3, 61]])
PADDED_VOCAB = 104
EMBEDDING = "embedding.word_embeddings.weight"


class UnlikeHeads(torch.nn.Module):
    """Attention whose values have a width of their own, which Megatron-Core takes from TransformerEngine."""

    def __init__(self, *, softmax_scale: float, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Attend from query [S, B, heads, d]. Returns [S, B, heads * v]."""
        heads = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        output = F.scaled_dot_product_attention(*heads, is_causal=True, scale=self.scale)
        return output.permute(2, 0, 1, 3).flatten(2)


def build(folder: Path, layout: ParallelLayout, te_names: bool) -> GPTModel:
    """Return the model of a Hugging Face config, with layers of Megatron-Core's local spec and random weights.

    Its vocabulary is padded.

    Args:
        folder: the config's folder.
        layout: the layout of Megatron-Core's groups.
        te_names: name the norms as TransformerEngine's spec does.
    """
    config = json.loads((folder / "config.json").read_text())
    spec_config = _config(config, layout)
    spec = get_gpt_decoder_block_spec(spec_config, use_transformer_engine=False)
    for layer, names in zip(spec.layer_specs, _layers_with_experts(config), strict=True):
        if "kv_lora_rank" in config:
            layer.submodules.self_attention.submodules.core_attention = UnlikeHeads
        if te_names and "kv_lora_rank" in config:
            fused = {
                f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_" for x in ("q", "kv")
            }
            layer.submodules.sharded_state_dict_keys_map = fused | (
                {} if names else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
            )
        elif te_names and names:
            layer.submodules.sharded_state_dict_keys_map = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    torch.manual_seed(7)
    model = GPTModel(
        spec_config,
        spec,
        vocab_size=PADDED_VOCAB,
        max_sequence_length=128,
        parallel_output=False,
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
        position_embedding_type="yarn" if config["model_type"] == "gpt_oss" else "rope",
        rotary_base=config["rope_parameters"]["rope_theta"],
    )
    for name, parameter in model.named_parameters():
        parameter.data.normal_(std=0.2) if parameter.ndim > 1 or name.endswith("bias") else parameter.data.uniform_(
            0.5, 1.5
        )
    return model


def _config(config: dict[str, Any], layout: ParallelLayout) -> TransformerConfig:
    heads = config["num_attention_heads"]
    fields: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": heads,
        "num_query_groups": config["num_key_value_heads"],
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "layernorm_epsilon": config["rms_norm_eps"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": config["model_type"].startswith("qwen2"),
        "qk_layernorm": config["model_type"].startswith(("qwen3", "deepseek")),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": layout.tp,
        "expert_model_parallel_size": layout.ep,
    }
    has_experts = _layers_with_experts(config)
    if any(has_experts):
        fields |= {
            "num_moe_experts": _n_experts(config),
            "moe_ffn_hidden_size": config.get("moe_intermediate_size", config["intermediate_size"]),
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_router_pre_softmax": not config.get("norm_topk_prob"),
            "moe_router_load_balancing_type": "none",
            "moe_shared_expert_intermediate_size": config.get("shared_expert_intermediate_size"),
            "moe_shared_expert_gate": "shared_expert_intermediate_size" in config,
            "moe_token_dispatcher_type": "allgather",
        }
    if "n_shared_experts" in config:
        fields["moe_shared_expert_intermediate_size"] = config["n_shared_experts"] * config["moe_intermediate_size"]
        fields["moe_router_topk_scaling_factor"] = config["routed_scaling_factor"]
    if config["model_type"] == "deepseek_v3":
        fields |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": config["n_group"],
            "moe_router_group_topk": config["topk_group"],
        }
    if len(set(has_experts)) > 1:
        fields["moe_layer_freq"] = [int(has) for has in has_experts]
    if config["model_type"] == "gpt_oss":
        fields |= _gpt_oss_fields(config)
    if "kv_lora_rank" in config:
        return MLATransformerConfig(**fields, **_latent_fields(config), **_yarn_fields(config["rope_parameters"]))
    found = TransformerConfig(**fields)
    if config["model_type"] == "gpt_oss":
        vars(found).update(_gpt_oss_positions(config["rope_parameters"]))
    return found


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

    Under the local spec's names it must have no others, either. Returns the model's logits.
    """
    model = build(folder, _enter(layout), te_names)
    strict = "assume_ok_unexpected" if te_names else "raise_all"
    state = dist_checkpointing.load(model.sharded_state_dict(metadata=metadata), str(checkpoint), strict=strict)
    # Megatron-LM reorders queries, keys and values of a checkpoint without a version.
    assert state.pop("checkpoint_version") >= 2.0
    state.pop("iteration")
    model.load_state_dict(state)
    return _logits(model)


def save(
    folder: Path, checkpoint: Path, metadata: dict[str, Any], te_names: bool, layout: str, prefix: str
) -> torch.Tensor:
    """In a worker: save a random model as Megatron-Core does, with a tensor of an optimizer. Returns its logits."""
    # Megatron-Core writes in processes of its own, which a daemon may not start.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    model = build(folder, _enter(layout), te_names)
    state = model.sharded_state_dict(prefix=prefix, metadata=metadata)
    moment = ShardedTensor.from_rank_offsets(f"optimizer.state.exp_avg.{prefix}{EMBEDDING}", torch.ones(3))
    # Megatron-Core would start a process for its queue that imports all libraries anew, and would outlive this worker,
    # which ends without cleaning up.
    with multiprocessing.get_context("fork").Manager() as manager:
        filesystem_async._results_queue = manager.Queue()
        dist_checkpointing.save({**state, "moment": moment}, str(checkpoint), validate_access_integrity=False)
    filesystem_async._results_queue = None
    return _logits(model)
