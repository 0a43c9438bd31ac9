"""GPT-OSS: attention with sinks, a sliding window in every second layer, and experts with biases and a clamp.

Published files have experts in MXFP4; `fivefold convert` makes bfloat16 of them.
"""

from __future__ import annotations

from dataclasses import replace

from fivefold.families.decoder import add_experts, listed_windows, read_dense
from fivefold.families.family import Family, JointNames, MoENames
from fivefold.families.hf_config import HFConfig
from fivefold.families.shape import ModelShape

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What transformers takes for rotary positions that a file leaves out."""


def _read(config: HFConfig) -> ModelShape:
    alternating = [layer % 2 == 0 for layer in range(config.integer("num_hidden_layers"))]
    if (alpha := config.number("swiglu_alpha")) != 1.702:
        raise config.error(f"swiglu_alpha={alpha:g} is not supported; it must be 1.702")
    has_bias = config.flag("attention_bias")
    dense = read_dense(
        config, window_layers=listed_windows(config, alternating), knows_attention_bias=False, qkv_bias=has_bias
    )
    shape = add_experts(
        dense,
        config,
        moe_layers=(True,) * dense.n_layers,
        width_key="intermediate_size",
        norm_topk_prob=True,
    )
    return replace(
        shape, sinks=True, output_bias=has_bias, router_shift=True, expert_clamp=config.number("swiglu_limit")
    )


GPT_OSS = Family(
    "gpt_oss",
    read=_read,
    defaults={
        "attention_bias": True,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _YARN,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    moe=MoENames(
        router="mlp.router.weight", router_in_memory="mlp.router", shift="mlp.router.bias", joint=JointNames()
    ),
)
