"""What Megatron-Core's configuration classes are filled with, as plain values: from a recipe, a layout and a model.

recipe, layout, shape ─> {class: {field: value}} ─> fivefold.mcore.settings      Megatron-Core's objects
                                                 ─> fivefold plan --effective    what differs from its defaults

Number formats and functions are named by texts. Fields that are not mentioned keep Megatron-Core's defaults, which
a file in `megatron_fields/` lists; `python scripts/megatron_fields.py` writes it from the installed Megatron-Core.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, TypedDict

from fivefold.config.schema.engine import EngineConfig, OptimizerConfig
from fivefold.config.schema.megatron import MegatronConfig, MegatronFields
from fivefold.families.megatron_release import installed_release
from fivefold.families.shape import ModelShape
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.stages import chunk_sizes

Values = dict[str, Any]
"""Field -> value."""

HANDED_ON: Mapping[str, frozenset[str]] = {
    "TransformerConfig": frozenset(
        {
            "bias_activation_fusion",
            "moe_deepep_num_sms",
            "moe_shared_expert_overlap",
            "deallocate_pipeline_outputs",
            "batch_p2p_sync",
            "microbatch_group_size_per_vp_stage",
            "clone_scatter_output_in_embedding",
            "disable_bf16_reduced_precision_matmul",
        }
    ),
    "DistributedDataParallelConfig": frozenset(
        {
            "bucket_size",
            "grad_reduce_in_fp32",
            "pad_buckets_for_high_nccl_busbw",
            "reduce_scatter_with_fp32_accumulation",
        }
    ),
    "OptimizerConfig": frozenset(
        {
            "decoupled_weight_decay",
            "apply_wd_to_qk_layernorm",
            "decoupled_lr",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
            "store_param_remainders",
        }
    ),
}
"""Fields of each class that have the recipe's value as it is. The functions below compute all others."""


class Field(TypedDict):
    """A field of one of Megatron-Core's classes."""

    type: str
    default: Any


@cache
def megatron_fields() -> dict[str, dict[str, Field]]:
    """Return the fields of each of Megatron-Core's configuration classes, as the installed release has them."""
    fields: dict[str, dict[str, Field]] = json.loads(installed_release().fields_file.read_text(encoding="utf-8"))
    return fields


def changed_values(
    config: EngineConfig, optimizer: OptimizerConfig, layout: ParallelLayout, shape: ModelShape, *, on_gpu: bool
) -> dict[str, Values]:
    """Return, for each class, the values of a trained model that differ from Megatron-Core's defaults."""
    settings = {
        "TransformerConfig": transformer_settings(config, layout, shape),
        "DistributedDataParallelConfig": ddp_settings(config.megatron, layout, on_gpu=on_gpu),
        "OptimizerConfig": optimizer_settings(config, optimizer),
    }
    defaults = megatron_fields()
    return {
        name: {field: value for field, value in values.items() if value != defaults[name][field]["default"]}
        for name, values in settings.items()
    }


def transformer_settings(config: EngineConfig, layout: ParallelLayout, shape: ModelShape) -> Values:
    """Return the values of `TransformerConfig` for a model with the recipe's options on a layout."""
    fields = {
        **_model_fields(shape),
        **_parallel_fields(layout),
        **_stage_fields(layout, shape),
        **_recompute_fields(config.megatron, shape),
        **_handed_on(config.megatron.transformer),
        "params_dtype": config.dtype,
        "pipeline_dtype": config.dtype,
        "bf16": config.dtype == "bfloat16",
        "fp16": config.dtype == "float16",
        "deterministic_mode": config.megatron.use_deterministic_algorithms,
        # Every weight comes through the bridge, random ones too: what Megatron-Core would draw depends on the layout.
        # Its initialisation still runs, because it marks the parameters that are sharded.
        "init_method": "none",
        "output_layer_init_method": "none",
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
        "variable_seq_lengths": config.megatron.token_dispatcher != "allgather",
    }
    if shape.is_moe:
        fields |= _moe_fields(config.megatron, layout, shape)
    return fields


def _handed_on(section: MegatronFields) -> Values:
    renamed = installed_release().renamed
    return {renamed.get(name, name): getattr(section, name) for name in sorted(HANDED_ON[section.owner])}


def _model_fields(shape: ModelShape) -> Values:
    return {
        "num_layers": shape.n_layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.n_heads,
        "num_query_groups": shape.n_kv_heads,
        "kv_channels": shape.head_dim,
        "multi_latent_attention": shape.latent is not None,
        "ffn_hidden_size": shape.ffn_hidden,
        "attention_output_gate": shape.output_gate,
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": shape.zero_centered_norms,
        "layernorm_epsilon": shape.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": shape.activation if shape.expert_clamp is None else "quick_gelu",
        "softmax_scale": shape.score_scale,
        "activation_func_clamp_value": shape.expert_clamp,
        "glu_linear_offset": 0.0 if shape.expert_clamp is None else 1.0,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm and not shape.wide_qk_norm,
    }


def _parallel_fields(layout: ParallelLayout) -> Values:
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


def _stage_fields(layout: ParallelLayout, shape: ModelShape) -> Values:
    """Return the layers of each chunk, unless they are equal; all of Megatron-Core's ways to say so become this one."""
    sizes = chunk_sizes(shape.n_layers, layout.pp, layout.vpp, layout.split)
    if len(set(sizes)) == 1:
        return {}
    chunks = [["decoder"] * size for size in sizes]
    return {"pipeline_model_parallel_layout": [["embedding", *chunks[0]], *chunks[1:-1], [*chunks[-1], "loss"]]}


def _recompute_fields(config: MegatronConfig, shape: ModelShape) -> Values:
    granularity, fields = config.recompute_granularity, config.transformer
    if granularity == "none":
        return {}
    if granularity == "selective":
        modules = config.recompute_modules(is_moe=shape.is_moe)
        return {"recompute_granularity": "selective", "recompute_modules": list(modules)}
    return {
        "recompute_granularity": "full",
        "recompute_method": fields.recompute_method or "uniform",
        "recompute_num_layers": fields.recompute_num_layers or 1,
    }


def _moe_fields(config: MegatronConfig, layout: ParallelLayout, shape: ModelShape) -> Values:
    own = config.transformer
    # Each rank weights its z-loss with its own tokens, after Megatron-Core has divided it by the number of ranks.
    n_ranks = 1 if installed_release().weighs_z_loss else layout.tp * layout.cp
    z_loss = own.moe_z_loss_coeff * n_ranks if own.moe_z_loss_coeff else None
    has_groups = shape.expert_groups > 1
    return {
        "num_moe_experts": shape.n_experts,
        "moe_router_topk": shape.top_k,
        "moe_ffn_hidden_size": shape.expert_ffn_hidden,
        "moe_layer_freq": [int(is_moe) for is_moe in shape.moe_layers],
        "moe_shared_expert_intermediate_size": shape.shared_expert_ffn_hidden or None,
        "moe_shared_expert_gate": shape.shared_expert_gate,
        # Softmax over the chosen experts is softmax over all, scaled to sum to 1.
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        "moe_router_score_function": shape.router_scores,
        "moe_router_enable_expert_bias": shape.router_bias,
        "moe_router_bias_update_rate": own.moe_router_bias_update_rate,
        "moe_router_topk_scaling_factor": shape.router_scale if shape.router_scale != 1 else None,
        "moe_router_dtype": None if config.router_dtype == "model" else config.router_dtype,
        "moe_router_load_balancing_type": own.moe_router_load_balancing_type,
        "moe_router_num_groups": own.moe_router_num_groups or (shape.expert_groups if has_groups else None),
        "moe_router_group_topk": own.moe_router_group_topk or (shape.groups_per_token if has_groups else None),
        "moe_router_force_load_balancing": own.moe_router_force_load_balancing,
        "moe_aux_loss_coeff": own.moe_aux_loss_coeff,
        "moe_z_loss_coeff": z_loss,
        "moe_grouped_gemm": True,
        "moe_permute_fusion": False,
    }


def ddp_settings(config: MegatronConfig, layout: ParallelLayout, *, on_gpu: bool) -> Values:
    """Return the values of `DistributedDataParallelConfig`, with which gradients are summed.

    Unless the recipe decides, the reductions overlap with the backward pass on GPUs, if there are ranks to reduce over.
    """
    overlap = config.ddp.overlap_grad_reduce
    if overlap is None:
        overlap = on_gpu and max(layout.dp * layout.cp, layout.edp) > 1
    return {
        **_handed_on(config.ddp),
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": overlap,
        "average_in_collective": False,
        # Weights are exported right after a step, before an overlapped gather would have filled them.
        "overlap_param_gather": False,
    }


def optimizer_settings(config: EngineConfig, optimizer: OptimizerConfig) -> Values:
    """Return the values of Megatron-Core's `OptimizerConfig`: AdamW, sharded over data-parallel ranks."""
    own = config.megatron.optimizer
    end = own.decoupled_min_lr
    if end is None and own.decoupled_lr is not None:
        end = own.decoupled_lr * optimizer.min_lr_ratio
    return {
        **_handed_on(own),
        "optimizer": "adam",
        "lr": optimizer.lr,
        "min_lr": optimizer.lr * optimizer.min_lr_ratio,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_eps": optimizer.eps,
        "clip_grad": optimizer.gradient_clipping,
        "use_distributed_optimizer": True,
        "params_dtype": config.dtype,
        "bf16": config.dtype == "bfloat16",
        "overlap_param_gather": False,
        "decoupled_min_lr": end,
    }
