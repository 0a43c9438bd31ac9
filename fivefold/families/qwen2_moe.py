"""Qwen1.5-MoE and Qwen2-MoE: experts next to a shared expert, which a sigmoid gate scales."""

from __future__ import annotations

from fivefold.families.decoder import add_experts, lists_layers, read_dense, sparse_layers, uses_window
from fivefold.families.family import Family, MLPNames, MoENames
from fivefold.families.hf_config import HFConfig
from fivefold.families.shape import ModelShape

SHARED = MLPNames(
    gate="mlp.shared_expert.gate_proj.weight",
    up="mlp.shared_expert.up_proj.weight",
    down="mlp.shared_expert.down_proj.weight",
)
SHARED_GATE = "mlp.shared_expert_gate.weight"


def with_experts(dense: ModelShape, config: HFConfig) -> ModelShape:
    """Return a decoder with experts next to a gated shared expert, as Qwen2-MoE's config describes them."""
    return add_experts(
        dense,
        config,
        moe_layers=sparse_layers(config),
        width_key="moe_intermediate_size",
        norm_topk_prob=config.flag("norm_topk_prob"),
        gated_shared_key="shared_expert_intermediate_size",
    )


def _read(config: HFConfig) -> ModelShape:
    has_window = uses_window(config) and not lists_layers(config)
    return with_experts(read_dense(config, has_window=has_window, qkv_bias=config.flag("qkv_bias")), config)


QWEN2_MOE = Family(
    "qwen2_moe",
    read=_read,
    defaults={"qkv_bias": True, "sliding_window": 4096},
    moe=MoENames(shared=SHARED, shared_gate=SHARED_GATE),
)
