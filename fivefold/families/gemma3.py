"""Gemma 3, its models of text: norms around attention and MLP, and sliding windows with positions unlike other layers'.

Embeddings are multiplied by sqrt(hidden), and the output layer is the embedding. MLPs are gated by GELU.
"""

from __future__ import annotations

from dataclasses import replace

from fivefold.families.decoder import listed_windows, read_dense
from fivefold.families.family import Family
from fivefold.families.hf_config import HFConfig
from fivefold.families.rope import local_theta
from fivefold.families.shape import ModelShape


def _read(config: HFConfig) -> ModelShape:
    config.refuse(("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"))
    every = config.integer("sliding_window_pattern")
    windows = [(layer + 1) % every != 0 for layer in range(config.integer("num_hidden_layers"))]
    dense = read_dense(
        config,
        window_layers=listed_windows(config, windows),
        qk_norm=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        rope_kind="full_attention",
    )
    return replace(
        dense,
        local_rope_theta=local_theta(config),
        score_scale=config.number("query_pre_attn_scalar") ** -0.5,
        scaled_embedding=True,
        sandwich_norms=True,
        activation="gelu_tanh",
        zero_centered_norms=True,
    )


GEMMA3 = Family(
    "gemma3_text",
    read=_read,
    defaults={
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 1e4,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
)
