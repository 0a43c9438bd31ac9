"""GLM-4.7-Flash: the attention of DeepSeek-V3 and the experts of GLM-4.5.

Layers for multi-token prediction, which its files hold behind the last layer, are not read and not written.
"""

from __future__ import annotations

from fivefold.families import sigmoid_experts
from fivefold.families.family import Family
from fivefold.families.hf_config import HFConfig
from fivefold.families.latent_attention import read_latent_decoder
from fivefold.families.shape import ModelShape


def _read(config: HFConfig) -> ModelShape:
    dense = read_latent_decoder(config)
    kinds = config.items("mlp_layer_types", str)
    if kinds and len(kinds) != dense.n_layers:
        raise config.error(f"mlp_layer_types has {len(kinds)} entries for num_hidden_layers={dense.n_layers}")
    moe_layers = [kind == "sparse" for kind in kinds] or sigmoid_experts.layers_behind_dense(config, dense.n_layers)
    return sigmoid_experts.add_sigmoid_experts(dense, config, moe_layers)


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
