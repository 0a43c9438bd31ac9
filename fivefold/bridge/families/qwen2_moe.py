"""Qwen1.5-MoE and Qwen2-MoE: experts beside a shared expert, which a sigmoid gate scales."""

from __future__ import annotations

from fivefold.bridge.families.family import Family, MLPNames, MoENames

QWEN2_MOE = Family(
    "qwen2_moe",
    moe=MoENames(
        router="mlp.gate.weight",
        expert=MLPNames(
            gate="mlp.experts.{expert}.gate_proj.weight",
            up="mlp.experts.{expert}.up_proj.weight",
            down="mlp.experts.{expert}.down_proj.weight",
        ),
        shared=MLPNames(
            gate="mlp.shared_expert.gate_proj.weight",
            up="mlp.shared_expert.up_proj.weight",
            down="mlp.shared_expert.down_proj.weight",
        ),
        shared_gate="mlp.shared_expert_gate.weight",
    ),
)
