"""GLM-4.5 and GLM-4.6 with experts: the first layers dense, sigmoid routing with offsets, a shared expert.

Layers for multi-token prediction, which their files hold behind the last layer, are not read and not written.
"""

from __future__ import annotations

from dataclasses import replace

from fivefold.families.decoder import add_experts, read_dense
from fivefold.families.family import Family, MLPNames, MoENames
from fivefold.families.hf_config import HFConfig
from fivefold.families.shape import ModelShape


def _read(config: HFConfig) -> ModelShape:
    dense = read_dense(
        config,
        knows_attention_bias=False,
        # The output projection has none in this family.
        qkv_bias=config.flag("attention_bias"),
        qk_norm=config.flag("use_qk_norm"),
        is_rotated_in_part=True,
    )
    n_dense = config.integer("first_k_dense_replace", least=0)
    shape = add_experts(
        dense,
        config,
        moe_layers=[layer >= n_dense for layer in range(dense.n_layers)],
        width_key="moe_intermediate_size",
        norm_topk_prob=config.flag("norm_topk_prob"),
    )
    if not shape.is_moe:
        return shape
    if not shape.norm_topk_prob:
        raise config.error("norm_topk_prob=false is not supported: sigmoid scores are scaled to sum to 1")
    shape = replace(
        shape,
        # Several shared experts are one that is as wide as all of them.
        shared_expert_ffn_hidden=config.integer("n_shared_experts") * shape.expert_ffn_hidden,
        router_bias=True,
        router_scores="sigmoid",
        router_scale=config.number("routed_scaling_factor"),
        expert_groups=config.integer("n_group"),
        groups_per_token=config.integer("topk_group"),
    )
    _check_groups(config, shape)
    return shape


def _check_groups(config: HFConfig, shape: ModelShape) -> None:
    """Check groups of experts, of which Megatron-Core ranks each by its best top_k / topk_group experts."""
    groups, chosen = shape.expert_groups, shape.groups_per_token
    if groups > 1 and (shape.n_experts % groups or chosen > groups or shape.top_k != 2 * chosen):
        raise config.error(
            f"n_group={groups} must divide the {shape.n_experts} experts, and topk_group={chosen} be half of the "
            f"{shape.top_k} experts of a token"
        )


GLM4_MOE = Family(
    "glm4_moe",
    read=_read,
    defaults={
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "norm_topk_prob": True,
        "use_qk_norm": False,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
    },
    moe=MoENames(
        bias="mlp.gate.e_score_correction_bias",
        shared=MLPNames(
            gate="mlp.shared_experts.gate_proj.weight",
            up="mlp.shared_experts.up_proj.weight",
            down="mlp.shared_experts.down_proj.weight",
        ),
    ),
    predicts_further=True,
)
