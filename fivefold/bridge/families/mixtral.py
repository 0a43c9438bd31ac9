"""Mixtral: w1 is the gate, w3 the up and w2 the down projection."""

from __future__ import annotations

from fivefold.bridge.families.family import Family, MLPNames, MoENames

MIXTRAL = Family(
    "mixtral",
    moe=MoENames(
        router="block_sparse_moe.gate.weight",
        expert=MLPNames(
            gate="block_sparse_moe.experts.{expert}.w1.weight",
            up="block_sparse_moe.experts.{expert}.w3.weight",
            down="block_sparse_moe.experts.{expert}.w2.weight",
        ),
    ),
)
