"""DeepSeek-V2 and V2-Lite: multi-head latent attention, and softmax routing to experts next to shared experts.

V2's routers choose among the groups of experts whose best expert has the largest score; V2-Lite's have no groups.
"""

from __future__ import annotations

from dataclasses import replace

from fivefold.families.decoder import add_experts, check_groups
from fivefold.families.family import Family, MoENames
from fivefold.families.hf_config import HFConfig
from fivefold.families.latent_attention import read_latent_decoder
from fivefold.families.shape import ModelShape
from fivefold.families.sigmoid_experts import SHARED, layers_behind_dense, shared_width

_IN_GROUPS = "group_limited_greedy"


def _read(config: HFConfig) -> ModelShape:
    config.expect({"rope_interleave": True, "scoring_func": "softmax"})
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
    if (method := config.get("topk_method")) == _IN_GROUPS:
        shape = replace(
            shape,
            expert_groups=config.integer("n_group"),
            groups_per_token=config.integer("topk_group"),
            group_best=1,
        )
        check_groups(config, shape)
    elif method != "greedy":
        raise config.error(f"topk_method={method!r} is not supported; it must be 'greedy' or {_IN_GROUPS!r}")
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
