"""Qwen3.5 and Qwen3.6, dense and with experts: gated delta nets, and full attention in every fourth layer.

Their folders hold models that see images. The language model inside is trained; the vision tower and the tensors for
multi-token prediction stay as they are, and are written again unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from fivefold.families.decoder import HYBRID_DEFAULTS, add_experts, read_hybrid
from fivefold.families.family import Family, MoENames
from fivefold.families.hf_config import HFConfig
from fivefold.families.qwen2_moe import SHARED, SHARED_GATE
from fivefold.families.shape import ModelShape
from fivefold.families.vision import read_vision

_BODY = "model.language_model."
_KEPT = (r"model\.visual\..+", r"mtp\..+")
_DEFAULTS = {
    **HYBRID_DEFAULTS,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
    "image_token_id": 248056,
    "video_token_id": 248057,
}
_MOE_DEFAULTS = {**_DEFAULTS, "intermediate_size": 1}
"""Every layer has experts, and no layer a dense MLP, so that files do not give its width."""
_MOE = MoENames(shared=SHARED, shared_gate=SHARED_GATE)


def _read(config: HFConfig) -> ModelShape:
    shape = read_hybrid(config.inside("text_config"), is_grouped=False)
    if not config.fields("vision_config"):
        return shape
    return replace(shape, vision=read_vision(config, sections=(11, 11, 10), has_deepstack=False))


def _read_moe(config: HFConfig) -> ModelShape:
    dense = _read(config)
    return add_experts(
        dense,
        config.inside("text_config"),
        moe_layers=[True] * dense.n_layers,
        width_key="moe_intermediate_size",
        norm_topk_prob=True,
        gated_shared_key="shared_expert_intermediate_size",
    )


QWEN3_5 = Family(
    "qwen3_5",
    read=_read,
    defaults=_DEFAULTS,
    inner_type="qwen3_5_text",
    body=_BODY,
    kept=_KEPT,
    sees=True,
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe",
    read=_read_moe,
    defaults=_MOE_DEFAULTS,
    moe=_MOE,
    inner_type="qwen3_5_moe_text",
    body=_BODY,
    kept=_KEPT,
    sees=True,
)
