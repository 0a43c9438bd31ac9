"""Qwen3-Next: gated delta nets, full attention with output gates in every fourth layer, and experts.

The weights for multi-token prediction that its files hold are not trained, and written again unchanged.
"""

from __future__ import annotations

from fivefold.families.decoder import HYBRID_DEFAULTS, read_hybrid
from fivefold.families.family import Family, MoENames
from fivefold.families.qwen2_moe import SHARED, SHARED_GATE, with_experts

QWEN3_NEXT = Family(
    "qwen3_next",
    read=lambda config: with_experts(read_hybrid(config, is_grouped=True), config),
    defaults={**HYBRID_DEFAULTS, "norm_topk_prob": True},
    moe=MoENames(shared=SHARED, shared_gate=SHARED_GATE),
    kept=(r"mtp\..+",),
)
