"""GLM-4.5 and GLM-4.6 with experts: the first layers dense, sigmoid routing with offsets, a shared expert.

Layers for multi-token prediction, which their files hold behind the last layer, are not trained and written unchanged.
"""

from __future__ import annotations

from fivefold.families import sigmoid_experts
from fivefold.families.decoder import read_dense
from fivefold.families.family import Family
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
    moe_layers = sigmoid_experts.layers_behind_dense(config, dense.n_layers)
    return sigmoid_experts.add_sigmoid_experts(dense, config, moe_layers)


GLM4_MOE = Family(
    "glm4_moe",
    read=_read,
    defaults={
        **sigmoid_experts.DEFAULTS,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "use_qk_norm": False,
        "routed_scaling_factor": 1.0,
    },
    moe=sigmoid_experts.NAMES,
    predicts_further=True,
)
