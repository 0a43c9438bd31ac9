"""GLM-4.7-Flash: the attention of DeepSeek-V3 and the experts of GLM-4.5.

Layers for multi-token prediction, which its files hold behind the last layer, are not trained and written unchanged.
"""

from __future__ import annotations

from fivefold.families import sigmoid_experts
from fivefold.families.family import Family
from fivefold.families.hf_config import HFConfig
from fivefold.families.latent_attention import read_latent_decoder
from fivefold.families.shape import ModelShape


def _read(config: HFConfig) -> ModelShape:
    dense = read_latent_decoder(config)
    return sigmoid_experts.add_sigmoid_experts(dense, config, _moe_layers(config, dense.n_layers))


def _moe_layers(config: HFConfig, n_layers: int) -> list[bool]:
    """Return which layers have experts: those that `mlp_layer_types` lists, without it all but the first."""
    counted = sigmoid_experts.layers_behind_dense(config, n_layers)
    listed = sigmoid_experts.listed_layers(config, [layer > 0 for layer in range(n_layers)])
    if config.states("first_k_dense_replace") and counted != listed:
        raise config.error(
            f"first_k_dense_replace={config.get('first_k_dense_replace')} is not what transformers computes, which "
            "reads mlp_layer_types alone, and without it takes the first layer as the only dense one: list the layers "
            "in mlp_layer_types, and drop first_k_dense_replace"
        )
    return listed


GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    read=_read,
    defaults={
        **sigmoid_experts.DEFAULTS,
        "rope_interleave": True,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.8,
    },
    moe=sigmoid_experts.NAMES,
    predicts_further=True,
)
