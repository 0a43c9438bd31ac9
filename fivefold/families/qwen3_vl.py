"""Qwen3-VL, dense: Qwen3's decoder, to whose first layers a vision tower adds what it sees.

The language model is trained. The vision tower stays as it is, and is written again unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from fivefold.families.decoder import read_dense
from fivefold.families.family import Family
from fivefold.families.hf_config import HFConfig
from fivefold.families.shape import ModelShape
from fivefold.families.vision import read_vision


def _read(config: HFConfig) -> ModelShape:
    dense = read_dense(config.inside("text_config"), qk_norm=True)
    if not config.fields("vision_config"):
        return dense
    return replace(dense, vision=read_vision(config, sections=(24, 20, 20), has_deepstack=True))


QWEN3_VL = Family(
    "qwen3_vl",
    read=_read,
    defaults={
        "head_dim": 128,
        "rope_theta": 5e5,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "image_token_id": 151655,
        "video_token_id": 151656,
    },
    inner_type="qwen3_vl_text",
    body="model.language_model.",
    kept=(r"model\.visual\..+",),
    sees=True,
)
