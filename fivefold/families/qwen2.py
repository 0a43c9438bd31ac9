"""Qwen2 and Qwen2.5: Q, K and V have biases, and `attention_bias` is no key of theirs."""

from __future__ import annotations

from fivefold.families.decoder import has_window_above, read_dense
from fivefold.families.family import Family, GGUFArchitecture
from fivefold.families.hf_config import HFConfig
from fivefold.families.shape import ModelShape


def _read(config: HFConfig) -> ModelShape:
    return read_dense(config, has_window=has_window_above(config), knows_attention_bias=False, qkv_bias=True)


QWEN2 = Family(
    "qwen2",
    read=_read,
    defaults={"sliding_window": 4096},
    gguf=GGUFArchitecture("qwen2", "Qwen2ForCausalLM"),
)
