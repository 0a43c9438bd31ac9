"""DeepSeek-V2 and V2-Lite: multi-head latent attention, and softmax routing to experts beside shared experts."""

from __future__ import annotations

from dataclasses import replace

from fivefold.families.decoder import add_experts
from fivefold.families.family import Family, MoENames
from fivefold.families.hf_config import HFConfig
from fivefold.families.latent_attention import read_latent_decoder
from fivefold.families.shape import ModelShape
from fivefold.families.sigmoid_experts import SHARED, layers_behind_dense, shared_width


def _read(config: HFConfig) -> ModelShape:
    dense = read_latent_decoder(config)
    shape = add_experts(
        dense,
        config,
        moe_layers=layers_behind_dense(config, dense.n_layers),
        width_key="moe_intermediate_size",
        norm_topk_prob=config.flag("norm_topk_prob"),
    )
    if not shape.is_moe:
        return shape
    if shape.norm_topk_prob:
        raise config.error("norm_topk_prob=true is not supported: transformers does not read it for this family")
    if config.get("topk_method") != "greedy" and config.integer("n_group") > 1:
        raise config.error(
            f"topk_method={config.get('topk_method')!r} with n_group={config.get('n_group')} is not supported: "
            "Megatron-Core does not rank a group of experts by its best one"
        )
    return replace(
        shape,
        shared_expert_ffn_hidden=shared_width(config, shape),
        router_scale=config.number("routed_scaling_factor"),
    )


DEEPSEEK_V2 = Family(
    "deepseek_v2",
    read=_read,
    defaults={
        "rope_interleave": True,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    },
    moe=MoENames(shared=SHARED),
)
