"""MiniMax-M2: sigmoid routing with offsets in every layer, and norms over all query heads and over all key heads.

Heads are rotated in part: files say how many channels (`rotary_dim`), transformers writes their share. Layers for
multi-token prediction, which their files hold behind the last layer, are not trained and written unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from fivefold.families.decoder import add_experts, read_dense
from fivefold.families.family import Family, MoENames
from fivefold.families.hf_config import HFConfig
from fivefold.families.mixtral import EXPERT, refuse_noise
from fivefold.families.rope import channels_of
from fivefold.families.shape import ModelShape


def _read(config: HFConfig) -> ModelShape:
    config.expect(
        {
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "shared_intermediate_size": 0,
        }
    )
    refuse_noise(config)
    dense = read_dense(config, knows_attention_bias=False, qk_norm=True, is_rotated_in_part=True)
    shape = add_experts(
        dense,
        config,
        moe_layers=(True,) * dense.n_layers,
        width_key="intermediate_size",
        norm_topk_prob=True,
    )
    return replace(
        shape,
        wide_qk_norm=True,
        rotary_dim=channels_of(config, dense.head_dim),
        router_bias=True,
        router_scores="sigmoid",
    )


MINIMAX_M2 = Family(
    "minimax_m2",
    read=_read,
    defaults={"head_dim": 128, "partial_rotary_factor": 1.0, "rope_theta": 5e6, "router_jitter_noise": 0.0},
    moe=MoENames(
        router="block_sparse_moe.gate.weight",
        expert=EXPERT,
        bias="block_sparse_moe.e_score_correction_bias",
        bias_in_memory="mlp.e_score_correction_bias",
    ),
    predicts_further=True,
)
