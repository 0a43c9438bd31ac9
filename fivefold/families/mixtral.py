"""Mixtral: experts in every layer; w1 is the gate, w3 the up and w2 the down projection."""

from __future__ import annotations

from fivefold.families.decoder import add_experts, read_dense, window_in_all
from fivefold.families.family import Family, MLPNames, MoENames
from fivefold.families.hf_config import HFConfig
from fivefold.families.shape import ModelShape


def _read(config: HFConfig) -> ModelShape:
    dense = read_dense(config, window_layers=window_in_all(config))
    refuse_noise(config)
    return add_experts(
        dense,
        config,
        moe_layers=(True,) * dense.n_layers,
        width_key="intermediate_size",
        norm_topk_prob=True,
    )


def refuse_noise(config: HFConfig) -> None:
    """Refuse noise on what routers see.

    Raises:
        ValueError: the config has some.
    """
    if noise := config.number("router_jitter_noise"):
        raise config.error(f"router_jitter_noise={noise:g} is not supported, for training adds no noise: set it to 0")


EXPERT = MLPNames(
    gate="block_sparse_moe.experts.{expert}.w1.weight",
    up="block_sparse_moe.experts.{expert}.w3.weight",
    down="block_sparse_moe.experts.{expert}.w2.weight",
)
MIXTRAL = Family(
    "mixtral",
    read=_read,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "router_jitter_noise": 0.0},
    moe=MoENames(router="block_sparse_moe.gate.weight", expert=EXPERT),
)
