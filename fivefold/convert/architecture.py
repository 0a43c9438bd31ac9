"""GGUF's words for models: metadata keys and tensor names, and what they are called in Hugging Face folders.

GGUF                               Hugging Face
llama.embedding_length        ->   hidden_size                               config.json
blk.3.attn_q.weight           ->   model.layers.3.self_attn.q_proj.weight    model.safetensors
blk.3.ffn_gate_exps.weight    ->   model.layers.3.mlp.experts.0.gate_proj.weight, one tensor an expert

What is special to one architecture is with its family, in `fivefold.families`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fivefold.families.family import Family, GGUFArchitecture
from fivefold.families.registry import FAMILIES

_SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
"""Metadata keys that every architecture has, without their prefix, and the keys of config.json that they fill."""

_RMS_NORM_EPS = "attention.layer_norm_rms_epsilon"
_KV_HEADS = "attention.head_count_kv"
_ROPE_THETA = "rope.freq_base"
_HEAD_DIMS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_VOCAB_SIZE = "vocab_size"
_OTHER_KEYS = {_RMS_NORM_EPS, _KV_HEADS, _ROPE_THETA, *_HEAD_DIMS, _VOCAB_SIZE}

_DEFAULT_ROPE_THETA = 10000.0
"""What a file without `rope.freq_base` means."""

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
"""The output layer; a file of a model with tied embeddings has none."""
_MODEL_TENSORS = {
    "model.embed_tokens.weight": EMBEDDING,
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": OUTPUT,
}
_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
}
"""Modules of a layer with the same name in all families."""
_LAYER_NAME = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<module>.+)\.(?P<kind>weight|bias)")
_EXPERT_NUMBER = re.compile(r"(?<=\.experts)\.(\d+)(?=\.)")


def converted_families() -> dict[str, tuple[Family, GGUFArchitecture]]:
    """Return the families whose GGUF files can be converted, by `general.architecture`."""
    return {family.gguf.name: (family, family.gguf) for family in FAMILIES.values() if family.gguf is not None}


def architecture_of(metadata: Mapping[str, Any]) -> tuple[Family, GGUFArchitecture]:
    """Return the family of a file, and how GGUF holds it.

    Raises:
        ValueError: an architecture that cannot be converted.
    """
    name, known = metadata.get("general.architecture"), converted_families()
    if name not in known:
        raise ValueError(f"general.architecture is {name!r}; the convertible ones are {', '.join(known)}")
    return known[name]


@dataclass(frozen=True)
class TensorSource:
    """Where a Hugging Face tensor lies in a GGUF file."""

    name: str
    expert: int | None
    """Index into the first dimension; None where it is the whole tensor."""


def tensor_source(hf_name: str, family: Family) -> TensorSource:
    """Return the place of `hf_name`, a tensor of a model of `family`, in a GGUF file."""
    match = _LAYER_NAME.fullmatch(hf_name)
    if match is None:
        return TensorSource(_MODEL_TENSORS[hf_name], None)
    expert = _EXPERT_NUMBER.search(match["module"])
    name = _layer_tensors(family)[_EXPERT_NUMBER.sub(".{expert}", match["module"])]
    return TensorSource(f"blk.{match['layer']}.{name}.{match['kind']}", int(expert[1]) if expert else None)


def _layer_tensors(family: Family) -> dict[str, str]:
    """Return GGUF's name of each module of a layer; an expert's number is written `{expert}`."""
    weights = {family.mlp.gate: "ffn_gate", family.mlp.up: "ffn_up", family.mlp.down: "ffn_down"}
    if family.moe is not None:
        expert = family.moe.expert
        weights |= {family.moe.router: "ffn_gate_inp"}
        weights |= {expert.gate: "ffn_gate_exps", expert.up: "ffn_up_exps", expert.down: "ffn_down_exps"}
    return {**_LAYER_TENSORS, **{name.removesuffix(".weight"): gguf for name, gguf in weights.items()}}


def hf_config(metadata: Mapping[str, Any], *, vocab_size: int, tied_embeddings: bool) -> dict[str, Any]:
    """Return the `config.json` that the metadata describe, special tokens aside.

    Args:
        metadata: all of the file's key-value pairs.
        vocab_size: rows of the embedding.
        tied_embeddings: whether the file has no separate output tensor.

    Raises:
        ValueError: another architecture, a key that is missing, or one that stands for something not implemented.
    """
    family, architecture = architecture_of(metadata)
    prefix = f"{architecture.name}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    sizes = {**_SIZES, **architecture.sizes}
    _check_keys(own, sizes, prefix)
    config = {
        "architectures": [architecture.class_name],
        "model_type": family.model_type,
        **{name: own[key] for key, name in sizes.items()},
        "num_key_value_heads": own.get(_KV_HEADS, own["attention.head_count"]),
        "rms_norm_eps": _shortest(own[_RMS_NORM_EPS]),
        "rope_theta": _shortest(own.get(_ROPE_THETA, _DEFAULT_ROPE_THETA)),
        "hidden_act": "silu",
        "attention_bias": False,
        "vocab_size": vocab_size,
        "tie_word_embeddings": tied_embeddings,
        **architecture.constants,
    }
    config["head_dim"] = _head_dim(own, config["hidden_size"] // config["num_attention_heads"], prefix)
    return config


def _check_keys(own: Mapping[str, Any], sizes: Mapping[str, str], prefix: str) -> None:
    missing = sorted({*sizes, _RMS_NORM_EPS} - own.keys())
    if missing:
        raise ValueError(
            f"the file's metadata lack {', '.join(prefix + key for key in missing)}: it cannot be converted"
        )
    strays = sorted(own.keys() - sizes.keys() - _OTHER_KEYS)
    if strays:
        raise ValueError(
            f"the file's metadata have keys that the conversion does not know, so it would not be the same model: "
            f"{', '.join(f'{prefix}{key}={own[key]!r}' for key in strays)}"
        )


def _head_dim(own: Mapping[str, Any], implied: int, prefix: str) -> int:
    """Return the width of a head that the metadata state, or the `implied` one where they state none."""
    stated = {key: int(own[key]) for key in _HEAD_DIMS if key in own}
    if len(set(stated.values())) > 1:
        raise ValueError(
            f"the heads of queries, values and rotary positions must have one width, but the file's metadata have "
            f"{', '.join(f'{prefix}{key}={value}' for key, value in stated.items())}"
        )
    return next(iter(stated.values()), implied)


def _shortest(value: float) -> float:
    """Return the number that a float32 stands for: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")
