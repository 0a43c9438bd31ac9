"""GGUF's words for models: metadata keys and tensor names, and what they are called in Hugging Face folders.

GGUF                               Hugging Face
llama.embedding_length        ->   hidden_size                               config.json
blk.3.attn_q.weight           ->   model.layers.3.self_attn.q_proj.weight    model.safetensors
blk.3.ffn_gate_exps.weight    ->   model.layers.3.mlp.experts.0.gate_proj.weight, one tensor an expert
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
"""Metadata keys that every architecture has, without their prefix."""

_EXPERT_SIZES = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}

_RMS_NORM_EPS = "attention.layer_norm_rms_epsilon"
_KV_HEADS = "attention.head_count_kv"
_ROPE_THETA = "rope.freq_base"
_HEAD_DIMS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_VOCAB_SIZE = "vocab_size"
_OTHER_KEYS = {_RMS_NORM_EPS, _KV_HEADS, _ROPE_THETA, *_HEAD_DIMS, _VOCAB_SIZE}

_DEFAULT_ROPE_THETA = 10000.0
"""What a file without `rope.freq_base` means."""

_MODEL_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
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
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_LAYER_NAME = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<module>.+)\.(?P<kind>weight|bias)")
_EXPERT_NUMBER = re.compile(r"(?<=\.experts)\.(\d+)")


@dataclass(frozen=True)
class Architecture:
    """What one `general.architecture` means."""

    model_type: str
    class_name: str
    """The class of transformers that a config names under `architectures`."""
    rotates_neighbours: bool = False
    """Whether the rows of Q and K are stored for rotating neighbouring rows, instead of rows half a head apart."""
    sizes: Mapping[str, str] = field(default_factory=lambda: _SIZES)
    """Required metadata keys, without their prefix, and the keys of `config.json` that they fill."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `config.json` that GGUF has no word for."""


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", rotates_neighbours=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        sizes={**_SIZES, **_EXPERT_SIZES},
        constants={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
}


@dataclass(frozen=True)
class TensorSource:
    """Where a Hugging Face tensor lies in a GGUF file."""

    name: str
    expert: int | None
    """Index of its first dimension; None: the whole tensor."""


def tensor_source(hf_name: str) -> TensorSource:
    """The GGUF tensor that holds `hf_name`."""
    if match := _LAYER_NAME.fullmatch(hf_name):
        module = match["module"]
        expert = _EXPERT_NUMBER.search(module)
        name = _LAYER_TENSORS[_EXPERT_NUMBER.sub("", module)]
        return TensorSource(f"blk.{match['layer']}.{name}.{match['kind']}", int(expert[1]) if expert else None)
    module, _, kind = hf_name.rpartition(".")
    return TensorSource(f"{_MODEL_TENSORS[module]}.{kind}", None)


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """The file's architecture.

    Raises ValueError for one that is not in `ARCHITECTURES`.
    """
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture is {name!r}; those that can be converted are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def hf_config(metadata: Mapping[str, Any], *, vocab_size: int, tied_embeddings: bool) -> dict[str, Any]:
    """The `config.json` that the metadata describe, special tokens aside.

    Args:
        metadata: all of the file's key-value pairs.
        vocab_size: rows of the embedding.
        tied_embeddings: whether the file has no output tensor of its own.

    Raises:
        ValueError: another architecture, a key that is missing, or one that stands for something not implemented.
    """
    architecture = architecture_of(metadata)
    prefix = f"{metadata['general.architecture']}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    _check_keys(own, architecture, prefix)
    config = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        **{name: own[key] for key, name in architecture.sizes.items()},
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


def _check_keys(own: Mapping[str, Any], architecture: Architecture, prefix: str) -> None:
    missing = sorted({*architecture.sizes, _RMS_NORM_EPS} - own.keys())
    if missing:
        raise ValueError(
            f"the file's metadata lack {', '.join(prefix + key for key in missing)}: it cannot be converted"
        )
    strays = sorted(own.keys() - architecture.sizes.keys() - _OTHER_KEYS)
    if strays:
        raise ValueError(
            f"the file's metadata have keys that the conversion does not know, so it would not be the same model: "
            f"{', '.join(f'{prefix}{key}={own[key]!r}' for key in strays)}"
        )


def _head_dim(own: Mapping[str, Any], implied: int, prefix: str) -> int:
    stated = {key: int(own[key]) for key in _HEAD_DIMS if key in own}
    if len(set(stated.values())) > 1:
        raise ValueError(
            f"the heads of queries, values and rotary positions must have one width, but the file's metadata have "
            f"{', '.join(f'{prefix}{key}={value}' for key, value in stated.items())}"
        )
    return next(iter(stated.values()), implied)


def _shortest(value: float) -> float:
    """The number that was meant by a float32: 1e-05, not 9.999999747378752e-06."""
    return float(f"{value:.7g}")
