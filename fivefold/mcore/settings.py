"""Megatron-Core's own configuration objects, from a recipe and a model's shape."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from fivefold.config.schema.engine import EngineConfig, OptimizerConfig
from fivefold.families.shape import ModelShape
from fivefold.layout.parallel import ParallelLayout

_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def transformer_config(config: EngineConfig, layout: ParallelLayout, shape: ModelShape) -> TransformerConfig:
    """Return Megatron-Core's config of a model with the recipe's options on a layout."""
    dtype = getattr(torch, config.dtype)
    fields = {
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
        fields["recompute_modules"] = ["moe", "mlp"] if shape.is_moe else ["mlp"]
    if shape.is_moe:
        fields |= _moe_fields(config, layout, shape)
    return TransformerConfig(**fields)


def _leave(weight: torch.Tensor) -> None:
    """Initialise nothing."""


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


def _moe_fields(config: EngineConfig, layout: ParallelLayout, shape: ModelShape) -> dict[str, Any]:
    own = config.megatron.transformer
    # Each rank weights its z-loss with its own tokens, after Megatron-Core has divided it by the number of ranks.
    z_loss = own.moe_z_loss_coeff * layout.tp * layout.cp if own.moe_z_loss_coeff else None
    return {
        "num_moe_experts": shape.n_experts,
        "moe_router_topk": shape.top_k,
        "moe_ffn_hidden_size": shape.expert_ffn_hidden,
        "moe_layer_freq": [int(is_moe) for is_moe in shape.moe_layers],
        "moe_shared_expert_intermediate_size": shape.shared_expert_ffn_hidden or None,
        "moe_shared_expert_gate": shape.shared_expert_gate,
        # Softmax over the chosen experts is softmax over all, scaled to sum to 1.
        "moe_router_pre_softmax": not shape.norm_topk_prob,
        "moe_router_score_function": "softmax",
        "moe_router_dtype": "fp32" if config.megatron.router_dtype == "fp32" else None,
        "moe_router_load_balancing_type": "aux_loss",  # the only kind whose meaning packing does not change
        "moe_aux_loss_coeff": own.moe_aux_loss_coeff,
        "moe_z_loss_coeff": z_loss,
        "moe_grouped_gemm": True,
        "moe_permute_fusion": False,
    }


def ddp_config(config: EngineConfig, layout: ParallelLayout) -> DistributedDataParallelConfig:
    """Return the config of DDP, which sums gradients.

    Unless the recipe decides, the reductions overlap with the backward pass if there are ranks to reduce over.
    """
    own, overlap = config.megatron.ddp, config.megatron.ddp.overlap_grad_reduce
    if overlap is None:
        overlap = torch.cuda.is_available() and max(layout.dp * layout.cp, layout.edp) > 1
    return DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=own.grad_reduce_in_fp32,
        overlap_grad_reduce=overlap,
        bucket_size=own.bucket_size,
        average_in_collective=False,
        # Weights are exported right after a step, before an overlapped gather would have filled them.
        overlap_param_gather=False,
    )


def optimizer_config(config: EngineConfig, optimizer: OptimizerConfig) -> MegatronOptimizerConfig:
    """Return the config of AdamW, sharded over data-parallel ranks, whose state is left to `OptimizerState`."""
    dtype = getattr(torch, config.dtype)
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.eps,
        clip_grad=optimizer.gradient_clipping,
        use_distributed_optimizer=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        overlap_param_gather=False,
        decoupled_weight_decay=config.megatron.optimizer.decoupled_weight_decay,
        apply_wd_to_qk_layernorm=config.megatron.optimizer.apply_wd_to_qk_layernorm,
    )
    # Megatron-Core then makes no float32 copy of the weights and hands gradients over in whatever dtype they have. Its
    # option of this effect, `use_precision_aware_optimizer`, refuses optimizers other than TransformerEngine's.
    settings.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    return settings
