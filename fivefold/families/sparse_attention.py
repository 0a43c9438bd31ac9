"""Multi-head latent attention to tokens that an indexer chooses, in a `config.json`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from fivefold.families.hf_config import HFConfig
from fivefold.families.indexer import Indexer
from fivefold.families.latent_attention import read_latent_decoder
from fivefold.families.shape import ModelShape
from fivefold.families.sigmoid_experts import add_sigmoid_experts, layers_behind_dense, listed_layers

KEPT = (r"model\.layers\.\d+\.self_attn\.indexer\..+",)
"""Tensors of indexers."""
COMPUTED_AS = "glm4_moe_lite"
"""The model of transformers that has the same layers without indexers."""


def is_of_indexer(name: str) -> bool:
    """Return whether a tensor in files is part of an indexer."""
    return any(re.fullmatch(pattern, name) for pattern in KEPT)


def read_sparse_model(config: HFConfig, indexed: Sequence[bool]) -> ModelShape:
    """Return the shape of a model with such attention, the first layers dense and experts in the others.

    Args:
        config: the model's config.json.
        indexed: which layers have an indexer, one entry a layer.

    Raises:
        ValueError: a feature that is not implemented, or a key that is missing or inconsistent.
    """
    config.expect({"rope_interleave": True})
    dense = read_latent_decoder(config, kind="indexed_attention")
    indexer = Indexer(
        query_rank=config.integer("q_lora_rank"),
        n_heads=config.integer("index_n_heads"),
        dim=config.integer("index_head_dim"),
        top_k=config.integer("index_topk"),
        layers=tuple(indexed),
    )
    shape = add_sigmoid_experts(dense, config, _moe_layers(config, dense.n_layers))
    return replace(shape, indexer=indexer)


def _moe_layers(config: HFConfig, n_layers: int) -> list[bool]:
    counted = layers_behind_dense(config, n_layers)
    listed = listed_layers(config, counted)
    if config.states("first_k_dense_replace") and listed != counted:
        raise config.error(
            f"first_k_dense_replace={config.get('first_k_dense_replace')}, which servers read, differs from "
            "mlp_layer_types, which transformers reads: make them agree, or drop one"
        )
    return listed
