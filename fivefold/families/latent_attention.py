"""Multi-head latent attention in a `config.json`."""

from __future__ import annotations

import re

from fivefold.families.decoder import read_dense
from fivefold.families.hf_config import HFConfig
from fivefold.families.latent import LatentAttention
from fivefold.families.rope import score_factor
from fivefold.families.shape import ModelShape

_FUSED = re.compile(r"(.+\.self_attn)\.(?:q_a_proj|kv_a_proj_with_mqa)\.weight")
"""Projections down of one layer, which servers make one matrix."""


def loaded_together(name: str) -> str | None:
    """Return what is common to the names of tensors that a server must get in one bucket; None: it may come alone.

    SGLang forgets a projection down, without an error, unless the same bucket has the other one to be fused with.
    """
    match = _FUSED.fullmatch(name)
    return None if match is None else match[1]


def read_latent_decoder(config: HFConfig, *, kind: str = "full_attention") -> ModelShape:
    """Return the shape of a decoder with multi-head latent attention whose layers all have a dense MLP.

    `kind` is what `layer_types` may call a layer, besides `full_attention`.

    Raises:
        ValueError: a feature that is not implemented, or a key that is missing or inconsistent.
    """
    latent = LatentAttention(
        query_rank=None if config.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
        rotates_neighbours=config.flag("rope_interleave"),
        score_factor=score_factor(config),
    )
    if latent.rope_dim % 2:
        raise config.error(f"qk_rope_head_dim={latent.rope_dim} must be even: rotary positions turn pairs of channels")
    shape = read_dense(config, kinds={kind}, latent=latent)
    if shape.n_kv_heads != shape.n_heads:
        raise config.error(
            f"num_key_value_heads={shape.n_kv_heads} must be num_attention_heads={shape.n_heads}: each query head has "
            "its own keys and values"
        )
    return shape
