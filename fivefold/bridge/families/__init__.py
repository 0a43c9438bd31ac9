"""The model families that the bridge knows, by the `model_type` of their Hugging Face config."""

from __future__ import annotations

from fivefold.bridge.families.family import Family
from fivefold.bridge.families.llama import LLAMA
from fivefold.bridge.families.mixtral import MIXTRAL
from fivefold.bridge.families.qwen2 import QWEN2
from fivefold.bridge.families.qwen2_moe import QWEN2_MOE
from fivefold.bridge.families.qwen3 import QWEN3
from fivefold.bridge.families.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {f.model_type: f for f in (LLAMA, QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, MIXTRAL)}
