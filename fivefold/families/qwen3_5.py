"""Qwen3.5 and Qwen3.6, dense and with experts: gated delta nets, and full attention in every fourth layer.

Their folders hold models that see images. The language model inside is trained; the tensors for images and for
multi-token prediction stay as they are, and are written again unchanged.
"""

from __future__ import annotations

from fivefold.families.decoder import HYBRID_DEFAULTS, add_experts, read_hybrid
from fivefold.families.family import Family, MoENames
from fivefold.families.hf_config import HFConfig
from fivefold.families.qwen2_moe import SHARED, SHARED_GATE
from fivefold.families.shape import ModelShape

_BODY = "model.language_model."
_KEPT = (r"model\.visual\..+", r"mtp\..+")
_MOE_DEFAULTS = {**HYBRID_DEFAULTS, "intermediate_size": 1}
"""Every layer has experts, and no layer a dense MLP, so that files do not give its width."""
_MOE = MoENames(shared=SHARED, shared_gate=SHARED_GATE)


def _read_moe(config: HFConfig) -> ModelShape:
    dense = read_hybrid(config, is_grouped=False)
    return add_experts(
        dense,
        config,
        moe_layers=[True] * dense.n_layers,
        width_key="moe_intermediate_size",
        norm_topk_prob=True,
        gated_shared_key="shared_expert_intermediate_size",
    )


QWEN3_5 = Family(
    "qwen3_5",
    read=lambda config: read_hybrid(config.inside("text_config"), is_grouped=False),
    defaults=HYBRID_DEFAULTS,
    inner_type="qwen3_5_text",
    body=_BODY,
    kept=_KEPT,
)
QWEN3_5_MOE = Family(
    "qwen3_5_moe",
    read=lambda config: _read_moe(config.inside("text_config")),
    defaults=_MOE_DEFAULTS,
    moe=_MOE,
    inner_type="qwen3_5_moe_text",
    body=_BODY,
    kept=_KEPT,
)
