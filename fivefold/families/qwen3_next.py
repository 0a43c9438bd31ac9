"""Qwen3-Next: gated delta nets, full attention with output gates in every fourth layer, and experts.

The weights for multi-token prediction that its files hold are not trained, and written again unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from fivefold.families.decoder import add_experts, read_dense, sparse_layers
from fivefold.families.delta_net import read_delta_layers, read_delta_net
from fivefold.families.family import Family, MoENames
from fivefold.families.hf_config import HFConfig
from fivefold.families.qwen2_moe import SHARED, SHARED_GATE
from fivefold.families.shape import ModelShape


def _read(config: HFConfig) -> ModelShape:
    dense = read_dense(config, has_delta_nets=True, qk_norm=True, is_rotated_in_part=True)
    hybrid = replace(
        dense,
        delta=read_delta_net(config, is_grouped=True),
        delta_layers=read_delta_layers(config, dense.n_layers),
        output_gate=True,
        zero_centered_norms=True,
    )
    return add_experts(
        hybrid,
        config,
        moe_layers=sparse_layers(config),
        width_key="moe_intermediate_size",
        norm_topk_prob=config.flag("norm_topk_prob"),
        gated_shared_key="shared_expert_intermediate_size",
    )


QWEN3_NEXT = Family(
    "qwen3_next",
    read=_read,
    defaults={
        "full_attention_interval": 4,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
    },
    moe=MoENames(shared=SHARED, shared_gate=SHARED_GATE),
    kept=(r"mtp\..+",),
)
