"""Mistral: Llama's tensors. Files that do not say otherwise have a sliding window, which is refused."""

from __future__ import annotations

from fivefold.families.decoder import read_dense
from fivefold.families.family import Family
from fivefold.families.hf_config import HFConfig
from fivefold.families.shape import ModelShape


def _read(config: HFConfig) -> ModelShape:
    return read_dense(config, has_window=config.get("sliding_window") is not None)


MISTRAL = Family("mistral", read=_read, defaults={"sliding_window": 4096})
