"""Mistral: Llama's tensors, and a sliding window in every layer unless files say that there is none."""

from __future__ import annotations

from fivefold.families.decoder import read_dense, window_in_all
from fivefold.families.family import Family
from fivefold.families.hf_config import HFConfig
from fivefold.families.shape import ModelShape


def _read(config: HFConfig) -> ModelShape:
    return read_dense(config, window_layers=window_in_all(config))


MISTRAL = Family("mistral", read=_read, defaults={"sliding_window": 4096})
