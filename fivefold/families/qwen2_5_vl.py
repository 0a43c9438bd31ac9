"""Qwen2.5-VL: Qwen2's decoder, and a vision tower whose layers see windows of an image, but for a few that see all.

The language model is trained. The vision tower stays as it is, and is written again unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from fivefold.families.decoder import has_window_above, read_dense
from fivefold.families.family import Family
from fivefold.families.hf_config import HFConfig
from fivefold.families.shape import ModelShape
from fivefold.families.vision import read_windowed_vision


def _read(config: HFConfig) -> ModelShape:
    # Published files have the language model's keys next to the whole model's.
    text = config.inside("text_config") if config.fields("text_config") else config
    text.expect({"head_dim": text.integer("hidden_size") // text.integer("num_attention_heads")})
    dense = read_dense(text, has_window=has_window_above(text), knows_attention_bias=False, qkv_bias=True)
    if not config.fields("vision_config"):
        return dense
    return replace(dense, vision=read_windowed_vision(config, text, sections=(16, 24, 24)))


QWEN2_5_VL = Family(
    "qwen2_5_vl",
    read=_read,
    defaults={
        "sliding_window": 4096,
        "max_window_layers": 80,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "vision_start_token_id": 151652,
        "vision_end_token_id": 151653,
        "image_token_id": 151655,
        "video_token_id": 151656,
    },
    inner_type="qwen2_5_vl_text",
    kept=(r"visual\..+",),
    sees=True,
    tower="visual.",
)
