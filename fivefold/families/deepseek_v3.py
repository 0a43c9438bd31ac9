"""DeepSeek-V3 and R1, Moonlight and Kimi-K2: multi-head latent attention, and sigmoid routing with offsets.

Layers for multi-token prediction, which their files hold behind the last layer, are not trained and written unchanged.
"""

from __future__ import annotations

from fivefold.families import sigmoid_experts
from fivefold.families.family import Family
from fivefold.families.hf_config import HFConfig
from fivefold.families.latent_attention import read_latent_decoder
from fivefold.families.shape import ModelShape


def _read(config: HFConfig) -> ModelShape:
    dense = read_latent_decoder(config)
    moe_layers = sigmoid_experts.layers_behind_dense(config, dense.n_layers)
    return sigmoid_experts.add_sigmoid_experts(dense, config, moe_layers)


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    read=_read,
    defaults={
        **sigmoid_experts.DEFAULTS,
        "rope_interleave": True,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
    },
    moe=sigmoid_experts.NAMES,
    predicts_further=True,
)
