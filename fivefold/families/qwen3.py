"""Qwen3, dense: a norm on each query and key head."""

from __future__ import annotations

from fivefold.families.decoder import has_window_above, read_dense
from fivefold.families.family import Family, GGUFArchitecture
from fivefold.families.hf_config import HFConfig
from fivefold.families.shape import ModelShape


def _read(config: HFConfig) -> ModelShape:
    return read_dense(config, has_window=has_window_above(config), qk_norm=True)


QWEN3 = Family(
    "qwen3",
    read=_read,
    defaults={"head_dim": 128, "sliding_window": 4096},
    gguf=GGUFArchitecture("qwen3", "Qwen3ForCausalLM"),
)
