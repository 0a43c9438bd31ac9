"""Qwen3-VL, dense and with experts: Qwen3's decoder, to whose first layers a vision tower adds what it sees.

The language model is trained. The vision tower stays as it is, and is written again unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from fivefold.families.decoder import add_experts, read_dense, sparse_layers
from fivefold.families.family import Family, MoENames
from fivefold.families.hf_config import HFConfig
from fivefold.families.shape import ModelShape
from fivefold.families.vision import read_vision

_BODY = "model.language_model."
_KEPT = (r"model\.visual\..+",)
_DEFAULTS = {
    "head_dim": 128,
    "rope_theta": 5e5,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "image_token_id": 151655,
    "video_token_id": 151656,
}


def _read(config: HFConfig) -> ModelShape:
    return _with_vision(config, read_dense(config.inside("text_config"), qk_norm=True))


def _read_moe(config: HFConfig) -> ModelShape:
    text = config.inside("text_config")
    text.expect({"norm_topk_prob": True})
    shape = add_experts(
        read_dense(text, qk_norm=True),
        text,
        moe_layers=sparse_layers(text),
        width_key="moe_intermediate_size",
        norm_topk_prob=True,
    )
    if shape.hidden in (shape.expert_ffn_hidden, 2 * shape.expert_ffn_hidden):
        raise config.error(
            f"hidden_size={shape.hidden} is once or twice moe_intermediate_size={shape.expert_ffn_hidden}, by which "
            "transformers tells which way round files have the experts' matrices: use other sizes"
        )
    return _with_vision(config, shape)


def _with_vision(config: HFConfig, shape: ModelShape) -> ModelShape:
    if not config.fields("vision_config"):
        return shape
    return replace(shape, vision=read_vision(config, sections=(24, 20, 20), has_deepstack=True))


QWEN3_VL = Family(
    "qwen3_vl", read=_read, defaults=_DEFAULTS, inner_type="qwen3_vl_text", body=_BODY, kept=_KEPT, sees=True
)
QWEN3_VL_MOE = Family(
    "qwen3_vl_moe",
    read=_read_moe,
    defaults={key: value for key, value in _DEFAULTS.items() if key != "head_dim"},
    moe=MoENames(are_fused=True),
    inner_type="qwen3_vl_moe_text",
    body=_BODY,
    kept=_KEPT,
    sees=True,
)
