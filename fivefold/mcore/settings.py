"""Megatron-Core's own configuration objects, from a recipe and a model's shape."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from fivefold.config.schema import EngineConfig, OptimizerConfig
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.shape import ModelShape

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}

# What Fivefold's attention, norms, experts and dispatcher do in one way only: an override would be ignored, or worse.
_ONE_WAY: dict[str, Any] = {
    "fp16": False,
    "fp8": None,
    "fp4": None,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "window_size": None,
    "no_rope_freq": None,
    "rotary_interleaved": False,
    "attention_output_gate": False,
    "qk_clip": False,
    "layernorm_zero_centered_gamma": False,
    "apply_residual_connection_post_layernorm": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "moe_apply_probs_on_input": False,
    "moe_shared_expert_overlap": False,
    "moe_expert_capacity_factor": None,
    "moe_latent_size": None,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_force_load_balancing": False,
    "moe_router_enable_expert_bias": False,
    "moe_router_fusion": False,
    "moe_input_jitter_eps": None,
    "mtp_num_layers": None,
}


def transformer_config(config: EngineConfig, layout: ParallelLayout, shape: ModelShape) -> TransformerConfig:
    """The TransformerConfig of a model, `actor.megatron.transformer` applied on top.

    Raises:
        ValueError: an override that names no field, has the wrong type, or is set by Fivefold itself.
    """
    dtype = getattr(torch, config.dtype)
    chosen = {
        **_ONE_WAY,
        **_model_fields(shape),
        **_parallel_fields(layout),
        **_RECOMPUTE[config.megatron.recompute],
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "deterministic_mode": config.megatron.use_deterministic_algorithms,
        # Every weight comes through the bridge, random ones too: what Megatron-Core would draw depends on the layout.
        # Its initialisation still runs, because it marks the parameters that are sharded.
        "init_method": _leave,
        "output_layer_init_method": _leave,
        # The engine divides by global counts itself, so gradients are summed, never averaged.
        "calculate_per_token_loss": True,
        "attention_softmax_in_fp32": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": True,
        # For dense models too: Megatron-Core's default refuses uneven lengths even where there are no experts.
        "moe_token_dispatcher_type": config.megatron.token_dispatcher,
        # The all-gather dispatcher wants one length on all ranks, so the engine pads to it.
        "variable_seq_lengths": config.megatron.token_dispatcher == "alltoall",
    }
    if config.megatron.recompute == "selective":
        chosen["recompute_modules"] = ["moe", "mlp"] if shape.is_moe else ["mlp"]
    if shape.is_moe:
        chosen |= _moe_fields(config, shape)
    fields = _override("transformer", TransformerConfig, chosen, config.megatron.transformer)
    if fields.get("moe_z_loss_coeff"):
        # Each rank weights its z-loss with its own tokens, after Megatron-Core has divided it by the number of ranks.
        fields["moe_z_loss_coeff"] *= layout.tp * layout.cp
    return TransformerConfig(**fields)


def check(config: EngineConfig, layout: ParallelLayout, shape: ModelShape) -> None:
    """Check a recipe's overrides of Megatron-Core's fields, without a model.

    Raises:
        ValueError: an override that cannot be.
    """
    transformer_config(config, layout, shape)
    ddp_config(config, layout)
    optimizer_config(config, OptimizerConfig())


def _leave(weight: torch.Tensor) -> None:
    """Initialisation that does nothing."""


def _model_fields(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_layers": shape.n_layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.n_heads,
        "num_query_groups": shape.n_kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn_hidden,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "bias_activation_fusion": False,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
    }


def _parallel_fields(layout: ParallelLayout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.tp > 1,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        # Batched sends and receives of the interleaved schedule mix up two stages that are each other's neighbours on
        # both sides; one at a time they cannot.
        "overlap_p2p_comm": layout.vpp > 1,
        "batch_p2p_comm": layout.vpp == 1,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def _moe_fields(config: EngineConfig, shape: ModelShape) -> dict[str, Any]:
    return {
        "num_moe_experts": shape.n_experts,
        "moe_router_topk": shape.top_k,
        "moe_ffn_hidden_size": shape.expert_ffn_hidden,
        "moe_layer_freq": [int(is_moe) for is_moe in shape.moe_layers],
        "moe_shared_expert_intermediate_size": shape.shared_expert_ffn_hidden or None,
        "moe_shared_expert_gate": shape.shared_expert_ffn_hidden > 0,
        # Softmax over the chosen experts is softmax over all, scaled to sum to 1.
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        "moe_router_score_function": "softmax",
        "moe_router_dtype": "fp32" if config.megatron.router_dtype == "fp32" else None,
        # Reinforcement learning keeps the router where pre-training left it, unless told otherwise.
        "moe_router_load_balancing_type": "aux_loss",  # the one kind that packed sequences do not change the meaning of
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": True,
        "moe_permute_fusion": False,
    }


# Fields that a recipe may set although Fivefold gives them a value: that value is only a default.
_FREE = frozenset({"moe_aux_loss_coeff", "overlap_grad_reduce"})

# Fields that have a key of their own in the recipe.
_OWN_KEYS = {
    "recompute_granularity": "actor.megatron.recompute",
    "recompute_method": "actor.megatron.recompute",
    "recompute_num_layers": "actor.megatron.recompute",
    "recompute_modules": "actor.megatron.recompute",
    "deterministic_mode": "actor.megatron.use_deterministic_algorithms",
    "moe_router_dtype": "actor.megatron.router_dtype",
    "moe_token_dispatcher_type": "actor.megatron.token_dispatcher",
    "tensor_model_parallel_size": "actor.backend",
    "pipeline_model_parallel_size": "actor.backend",
    "virtual_pipeline_model_parallel_size": "actor.backend",
    "context_parallel_size": "actor.backend",
    "expert_model_parallel_size": "actor.backend",
    "expert_tensor_parallel_size": "actor.backend",
    "lr": "actor.optimizer.lr",
    "min_lr": "actor.optimizer.min_lr_ratio",
    "decoupled_lr": "actor.optimizer.lr",
    "decoupled_min_lr": "actor.optimizer.min_lr_ratio",
    "weight_decay": "actor.optimizer.weight_decay",
    "adam_beta1": "actor.optimizer.beta1",
    "adam_beta2": "actor.optimizer.beta2",
    "adam_eps": "actor.optimizer.eps",
    "clip_grad": "actor.optimizer.gradient_clipping",
    "params_dtype": "actor.dtype",
    "bf16": "actor.dtype",
}


def ddp_config(config: EngineConfig, layout: ParallelLayout) -> DistributedDataParallelConfig:
    """Gradients in float32, summed in buckets that overlap with the backward pass if there is anything to overlap."""
    chosen = {
        "use_distributed_optimizer": True,
        "grad_reduce_in_fp32": True,
        "overlap_grad_reduce": torch.cuda.is_available() and max(layout.dp * layout.cp, layout.edp) > 1,
        "average_in_collective": False,
        # Weights are exported right after a step, when a later gather would not have filled them.
        "overlap_param_gather": False,
        "use_megatron_fsdp": False,
        "num_distributed_optimizer_instances": 1,
    }
    return DistributedDataParallelConfig(**_override("ddp", DistributedDataParallelConfig, chosen, config.megatron.ddp))


def optimizer_config(config: EngineConfig, optimizer: OptimizerConfig) -> MegatronOptimizerConfig:
    """AdamW on float32 master weights, sharded over data-parallel ranks."""
    dtype = getattr(torch, config.dtype)
    chosen = {
        "optimizer": "adam",
        "lr": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_eps": optimizer.eps,
        "clip_grad": optimizer.gradient_clipping,
        "use_distributed_optimizer": True,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": False,
        "overlap_param_gather": False,
    }
    return MegatronOptimizerConfig(**_override("optimizer", MegatronOptimizerConfig, chosen, config.megatron.optimizer))


def _override(section: str, target: type, chosen: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`chosen` with the recipe's `overrides`, each checked against the fields of `target`."""
    hints = typing.get_type_hints(target)
    names = [field.name for field in dataclasses.fields(target) if field.init]
    for name, value in overrides.items():
        key = f"actor.megatron.{section}.{name}"
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{key}={value!r}: Megatron-Core's {target.__name__} has no such field{hint}")
        if name in _OWN_KEYS:
            raise ValueError(f"{key}={value!r}: Fivefold sets this field; use {_OWN_KEYS[name]} instead")
        if name in chosen and name not in _FREE:
            raise ValueError(
                f"{key}={value!r}: Fivefold sets this field itself (to {chosen[name]!r}); drop the override"
            )
        if not _fits(value, hints[name]):
            raise ValueError(f"{key}={value!r}: the field takes {hints[name]}, not {type(value).__name__}")
    return {**chosen, **overrides}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a YAML value may stand for a field of type `hint`. Types that YAML cannot write are refused."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, member) for member in typing.get_args(hint))
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if origin is list:
        (item,) = typing.get_args(hint)
        return isinstance(value, list) and all(_fits(element, item) for element in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str, type(None)):
        return isinstance(value, hint)
    return False
