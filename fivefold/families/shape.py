"""The shape of a model, read from its Hugging Face `config.json` alone: no torch, no transformers.

Five decoder families share one skeleton (RMSNorm, rotary positions, grouped-query attention, SwiGLU) and differ in the
flags below. A configuration that needs anything else is an error here, before a weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.families.hf_config import HFConfig


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    `linear` divides every frequency by `factor`; `llama3` divides the low ones, keeps the high ones, and blends between
    (Llama 3, https://arxiv.org/abs/2407.21783; the last three fields are its own, 0 for `linear`).
    """

    type: str
    factor: float
    low_freq_factor: float = 0.0
    high_freq_factor: float = 0.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True)
class ModelShape:
    """Everything that layouts, memory and weight names need to know of a model. Sizes are unpadded."""

    family: str
    """Hugging Face `model_type`: qwen2, qwen3, qwen2_moe, qwen3_moe, llama or mixtral."""
    n_layers: int
    hidden: int
    n_heads: int
    """Query heads."""
    n_kv_heads: int
    """Key/value heads (grouped-query attention)."""
    head_dim: int
    ffn_hidden: int
    """Width of a dense MLP; unused if every layer is MoE."""
    vocab: int
    max_positions: int
    n_experts: int
    """0: a dense model."""
    top_k: int
    """Experts that a token visits."""
    expert_ffn_hidden: int
    shared_expert_ffn_hidden: int
    """Width of the gated expert that every token visits; 0: none."""
    moe_layers: tuple[bool, ...]
    """Which layers are MoE, one entry a layer."""
    norm_topk_prob: bool
    """Whether the weights of the chosen experts are scaled to sum to 1."""
    qkv_bias: bool
    qk_norm: bool
    """RMSNorm on each query and key head."""
    tied_embeddings: bool
    """Whether the output layer is the embedding."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> ModelShape:
        """The shape that a parsed `config.json` describes, in the spelling of transformers 4 or 5.

        Raises:
            ValueError: a family or feature that is not implemented, or a key that is missing or inconsistent.
        """
        return _from_hf(HFConfig(config))

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return any(self.moe_layers)

    @property
    def n_moe_layers(self) -> int:
        """Layers that have experts."""
        return sum(self.moe_layers)

    @property
    def attention_parameters(self) -> int:
        """Of one layer: QKV (with bias), output projection, and q/k norms."""
        queries, keys = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        weights = self.hidden * (queries + 2 * keys) + queries * self.hidden
        bias = queries + 2 * keys if self.qkv_bias else 0
        return weights + bias + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def expert_parameters(self) -> int:
        """Of one expert: gate, up and down projections."""
        return 3 * self.hidden * self.expert_ffn_hidden

    @property
    def n_parameters(self) -> int:
        """All weights; tied embeddings count once."""
        return self._parameters(self.n_experts)

    @property
    def n_active_parameters(self) -> int:
        """Weights that one token touches: of the experts, the `top_k` that it visits."""
        return self._parameters(self.top_k)

    def _parameters(self, experts_counted: int) -> int:
        dense = 3 * self.hidden * self.ffn_hidden
        shared = 3 * self.hidden * self.shared_expert_ffn_hidden + (self.hidden if self.shared_expert_ffn_hidden else 0)
        moe = self.hidden * self.n_experts + experts_counted * self.expert_parameters + shared
        layers = self.n_layers * (self.attention_parameters + 2 * self.hidden)
        mlps = self.n_moe_layers * moe + (self.n_layers - self.n_moe_layers) * dense
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return layers + mlps + embeddings + self.hidden


def load_shape(path: str | Path) -> ModelShape:
    """The shape of the model in a Hugging Face folder, from its `config.json`.

    Raises:
        ValueError: no `config.json` there, one that is not JSON, or a model that is not supported.
    """
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"{file} does not exist: a model folder in Hugging Face format holds a config.json")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds a {type(config).__name__}; a model's configuration is an object")
    return ModelShape.from_hf(config)


def _from_hf(config: HFConfig) -> ModelShape:
    config.refuse_unsupported()
    n_layers, hidden, n_heads = (
        config.integer(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    n_kv_heads = config.n_kv_heads(n_heads)
    head_dim = config.head_dim(hidden, n_heads)
    moe_layers = config.moe_layers(n_layers)
    is_moe = any(moe_layers)
    theta, scaling = config.rope()
    return ModelShape(
        family=config.family,
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn_hidden=config.integer("intermediate_size"),
        vocab=config.integer("vocab_size"),
        max_positions=config.integer("max_position_embeddings"),
        n_experts=config.n_experts() if is_moe else 0,
        top_k=config.integer("num_experts_per_tok") if is_moe else 0,
        expert_ffn_hidden=config.expert_width() if is_moe else 0,
        shared_expert_ffn_hidden=config.shared_expert_width() if is_moe else 0,
        moe_layers=moe_layers,
        norm_topk_prob=config.norm_topk_prob(),
        qkv_bias=config.qkv_bias(),
        qk_norm=config.family in ("qwen3", "qwen3_moe"),
        tied_embeddings=config.flag("tie_word_embeddings"),
        rms_norm_eps=config.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=None if scaling is None else RopeScaling(**scaling),
    )
