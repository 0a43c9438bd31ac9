"""Every model family, by the `model_type` of its Hugging Face config. This is the only place that lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.families.deepseek_v2 import DEEPSEEK_V2
from fivefold.families.deepseek_v3 import DEEPSEEK_V3
from fivefold.families.deepseek_v32 import DEEPSEEK_V32
from fivefold.families.family import Family
from fivefold.families.gemma3 import GEMMA3
from fivefold.families.glm4_moe import GLM4_MOE
from fivefold.families.glm4_moe_lite import GLM4_MOE_LITE
from fivefold.families.glm_moe_dsa import GLM_MOE_DSA
from fivefold.families.gpt_oss import GPT_OSS
from fivefold.families.llama import LLAMA
from fivefold.families.minimax_m2 import MINIMAX_M2
from fivefold.families.mistral import MISTRAL
from fivefold.families.mixtral import MIXTRAL
from fivefold.families.qwen2 import QWEN2
from fivefold.families.qwen2_5_vl import QWEN2_5_VL
from fivefold.families.qwen2_moe import QWEN2_MOE
from fivefold.families.qwen3 import QWEN3
from fivefold.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from fivefold.families.qwen3_moe import QWEN3_MOE
from fivefold.families.qwen3_next import QWEN3_NEXT
from fivefold.families.qwen3_vl import QWEN3_VL, QWEN3_VL_MOE

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        LLAMA,
        QWEN2,
        QWEN3,
        QWEN2_MOE,
        QWEN3_MOE,
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        QWEN3_VL,
        QWEN3_VL_MOE,
        QWEN2_5_VL,
        MISTRAL,
        MIXTRAL,
        MINIMAX_M2,
        GPT_OSS,
        GEMMA3,
        GLM4_MOE,
        GLM4_MOE_LITE,
        GLM_MOE_DSA,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        DEEPSEEK_V32,
    )
}


_HINTS = {
    "kimi_k2": "; write deepseek_v3, as transformers calls Kimi-K2's models",
    "gemma3": "; of Gemma 3, only models of text alone (gemma3_text) are supported",
}
"""What errors add for types that are near a family."""


def family_in_memory(model_type: str) -> Family | None:
    """Return the family of a language model of transformers, as its own config names it; None: it is not known."""
    found = (family for family in FAMILIES.values() if model_type in (family.model_type, family.inner_type))
    return next(found, None)


def find_family(model_type: Any) -> Family:
    """Return the family that a config.json names as its `model_type`.

    Raises:
        ValueError: no family of that name.
    """
    # A config.json may hold anything, lists included, which no mapping takes as a key.
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        hint = _HINTS.get(model_type, "") if isinstance(model_type, str) else ""
        raise ValueError(f"model_type is {model_type!r}; the families that are known are {', '.join(FAMILIES)}{hint}")
    return family
