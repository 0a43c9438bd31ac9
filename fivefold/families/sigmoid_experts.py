"""Experts that sigmoid scores choose, in groups and with an offset for each expert, next to shared experts.

DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 2.1.2) has such layers, and GLM-4.5 took them over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fivefold.families.decoder import add_experts, check_groups
from fivefold.families.family import MLPNames, MoENames
from fivefold.families.hf_config import HFConfig
from fivefold.families.shape import ModelShape

SHARED = MLPNames(
    gate="mlp.shared_experts.gate_proj.weight",
    up="mlp.shared_experts.up_proj.weight",
    down="mlp.shared_experts.down_proj.weight",
)
NAMES = MoENames(bias="mlp.gate.e_score_correction_bias", shared=SHARED)
DEFAULTS: Mapping[str, Any] = {
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_OFFSETS = ".e_score_correction_bias"


def is_router_offset(name: str) -> bool:
    """Return whether a tensor holds the offsets of a router's scores, in files or in memory.

    They are float32 whatever the dtype of the model: rounded ones would choose other experts.
    """
    return name.endswith(_OFFSETS)


def add_sigmoid_experts(dense: ModelShape, config: HFConfig, moe_layers: Sequence[bool]) -> ModelShape:
    """Return `dense` with such experts in `moe_layers`.

    Raises:
        ValueError: routing that is not implemented, or a key that is missing or inconsistent.
    """
    shape = add_experts(
        dense,
        config,
        moe_layers=moe_layers,
        width_key="moe_intermediate_size",
        norm_topk_prob=config.flag("norm_topk_prob"),
    )
    if not shape.is_moe:
        return shape
    if not shape.norm_topk_prob:
        raise config.error("norm_topk_prob=false is not supported: sigmoid scores are scaled to sum to 1")
    config.expect({"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    shape = replace(
        shape,
        shared_expert_ffn_hidden=shared_width(config, shape),
        router_bias=True,
        router_scores="sigmoid",
        router_scale=config.number("routed_scaling_factor"),
        expert_groups=config.integer("n_group"),
        groups_per_token=config.integer("topk_group"),
    )
    check_groups(config, shape)
    return shape


def shared_width(config: HFConfig, shape: ModelShape) -> int:
    """Return the width of the shared expert: several are one that is as wide as all of them."""
    return config.integer("n_shared_experts") * shape.expert_ffn_hidden


def layers_behind_dense(config: HFConfig, n_layers: int) -> list[bool]:
    """Return which layers have experts: all but the first `first_k_dense_replace`."""
    config.expect({"moe_layer_freq": 1})
    n_dense = config.integer("first_k_dense_replace", least=0)
    return [layer >= n_dense for layer in range(n_layers)]


def listed_layers(config: HFConfig, otherwise: list[bool]) -> list[bool]:
    """Return which layers have experts as `mlp_layer_types` lists them; `otherwise` where it is left out.

    Raises:
        ValueError: not one kind a layer, or an unknown kind.
    """
    kinds, n_layers = config.items("mlp_layer_types", str), len(otherwise)
    if kinds and len(kinds) != n_layers:
        raise config.error(f"mlp_layer_types has {len(kinds)} entries for num_hidden_layers={n_layers}")
    if strays := sorted(set(kinds) - {"dense", "sparse"}):
        raise config.error(f"mlp_layer_types has {', '.join(strays)}; a layer is dense or sparse")
    return [kind == "sparse" for kind in kinds] or otherwise
