"""Qwen3 with experts (Qwen3-30B-A3B and its kin)."""

from __future__ import annotations

from fivefold.bridge.families.family import Family, MLPNames, MoENames

QWEN3_MOE = Family(
    "qwen3_moe",
    moe=MoENames(
        router="mlp.gate.weight",
        expert=MLPNames(
            gate="mlp.experts.{expert}.gate_proj.weight",
            up="mlp.experts.{expert}.up_proj.weight",
            down="mlp.experts.{expert}.down_proj.weight",
        ),
    ),
)
