"""Weights between Hugging Face files and Megatron-Core parameters."""

from __future__ import annotations

from fivefold.bridge.bridge import Bridge
from fivefold.bridge.groups import ShardGroups
from fivefold.bridge.hf_reader import HFWeights, resolve_model_folder
from fivefold.bridge.hf_writer import save_hf
from fivefold.bridge.mapping import padded_vocab

__all__ = ["Bridge", "HFWeights", "ShardGroups", "padded_vocab", "resolve_model_folder", "save_hf"]
