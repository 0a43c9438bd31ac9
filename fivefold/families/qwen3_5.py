"""Qwen3.5 and Qwen3.6, dense and with experts: gated delta nets, and full attention in every fourth layer.

Their folders hold models that see images. The language model inside is trained; the tensors for images and for
multi-token prediction stay as they are, and are written again unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from fivefold.families.decoder import add_experts, read_dense
from fivefold.families.delta_net import read_delta_layers, read_delta_net
from fivefold.families.family import Family, MoENames
from fivefold.families.hf_config import HFConfig
from fivefold.families.qwen2_moe import SHARED, SHARED_GATE
from fivefold.families.shape import ModelShape

_DEFAULTS = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.25,
}
_BODY = "model.language_model."
_KEPT = (r"model\.visual\..+", r"mtp\..+")
_MOE_DEFAULTS = {**_DEFAULTS, "intermediate_size": 1}
"""Every layer has experts, and no layer a dense MLP, so that files do not give its width."""
_MOE = MoENames(shared=SHARED, shared_gate=SHARED_GATE)


def _read_dense(config: HFConfig) -> ModelShape:
    shape = read_dense(config, has_delta_nets=True, qk_norm=True, is_rotated_in_part=True)
    return replace(
        shape,
        delta=read_delta_net(config, is_grouped=False),
        delta_layers=read_delta_layers(config, shape.n_layers),
        output_gate=True,
        zero_centered_norms=True,
    )


def _read_moe(config: HFConfig) -> ModelShape:
    dense = _read_dense(config)
    return add_experts(
        dense,
        config,
        moe_layers=[True] * dense.n_layers,
        width_key="moe_intermediate_size",
        norm_topk_prob=True,
        gated_shared_key="shared_expert_intermediate_size",
    )


QWEN3_5 = Family(
    "qwen3_5",
    read=lambda config: _read_dense(config.inside("text_config")),
    defaults=_DEFAULTS,
    inner_type="qwen3_5_text",
    body=_BODY,
    kept=_KEPT,
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe",
    read=lambda config: _read_moe(config.inside("text_config")),
    defaults=_MOE_DEFAULTS,
    moe=_MOE,
    inner_type="qwen3_5_moe_text",
    body=_BODY,
    kept=_KEPT,
)
