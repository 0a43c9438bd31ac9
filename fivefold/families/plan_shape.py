"""Model shapes for planning: those that train here, and families whose sizes alone are known.

`ModelShape` refuses what the engine cannot train. A plan needs sizes only, so it can also speak of DeepSeek-V3's
multi-head latent attention (MLA); `PlanShape.is_trainable` tells the two apart.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from fivefold.config.paths import PACKAGE_PREFIX, resolve_model_path
from fivefold.families.hf_config import as_number
from fivefold.families.shape import ModelShape

SHAPES = Path(__file__).parent / "shapes"
LATENT_FAMILIES = ("deepseek_v3",)
_VARIANT = re.compile(r"(-(Base|Instruct|Thinking|Chat))?(-(\d{4}|v\d\.\d))?$", re.IGNORECASE)
"""What is added to a model's name where it was trained further, such as `-Instruct-2507`."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: queries, and keys with values, pass through narrow projections.

    DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1. Megatron-Core keeps the projections down to a rank whole
    on every tensor parallel rank, and splits those up to the heads.
    """

    query_rank: int
    kv_rank: int
    nope_dim: int
    """Width of a head's queries and keys without position."""
    rope_dim: int
    """Width of the part with position; its key is shared by all heads."""
    value_dim: int


@dataclass(frozen=True)
class PlanShape(ModelShape):
    """A model's sizes, whether or not the engine can train it."""

    name: str
    latent: LatentAttention | None = None

    @staticmethod
    def of(shape: ModelShape, name: str) -> PlanShape:
        """`shape` under a name for tables."""
        return PlanShape(**{field.name: getattr(shape, field.name) for field in fields(ModelShape)}, name=name)

    @property
    def is_trainable(self) -> bool:
        """Whether Fivefold has an engine for it."""
        return self.latent is None

    @property
    def query_width(self) -> int:
        """Channels of all query heads; those of key heads that attention sees are `key_width`."""
        return self.n_heads * self._qk_dim

    @property
    def key_width(self) -> int:
        return self.n_kv_heads * self._qk_dim

    @property
    def value_width(self) -> int:
        """Channels of all value heads."""
        return self.n_kv_heads * self._value_dim

    @property
    def output_width(self) -> int:
        """Channels of attention's output, before the output projection."""
        return self.n_heads * self._value_dim

    @property
    def _qk_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.nope_dim + self.latent.rope_dim

    @property
    def _value_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def split_attention_parameters(self) -> int:
        """Of one layer, those that tensor parallelism divides."""
        if self.latent is None:
            return self.attention_parameters - self.whole_attention_parameters
        mla = self.latent
        queries = mla.query_rank * self.query_width
        keys_values = mla.kv_rank * self.n_heads * (mla.nope_dim + mla.value_dim)
        return queries + keys_values + self.output_width * self.hidden

    @property
    def whole_attention_parameters(self) -> int:
        """Of one layer, those that every tensor parallel rank has: q/k norms, and MLA's projections down."""
        if self.latent is None:
            return 2 * self.head_dim if self.qk_norm else 0
        mla = self.latent
        down = self.hidden * (mla.query_rank + mla.kv_rank + mla.rope_dim)
        return down + mla.query_rank + mla.kv_rank

    @property
    def attention_parameters(self) -> int:
        if self.latent is None:
            return super().attention_parameters
        return self.split_attention_parameters + self.whole_attention_parameters

    @property
    def dense_mlp_parameters(self) -> int:
        """Of one dense MLP: gate, up and down."""
        return 3 * self.hidden * self.ffn_hidden

    @property
    def shared_expert_parameters(self) -> int:
        """Of one MoE layer, without its gate."""
        return 3 * self.hidden * self.shared_expert_ffn_hidden

    @property
    def router_parameters(self) -> int:
        """Of one MoE layer: the router (DeepSeek's has a bias), and the gate of a shared expert (Qwen's has one)."""
        if self.latent is not None:
            return self.n_experts * (self.hidden + 1)
        return self.hidden * (self.n_experts + (1 if self.shared_expert_ffn_hidden else 0))

    @property
    def kv_cache_elements(self) -> int:
        """Elements that generation keeps for a token, in all layers. MLA keeps its latent, which heads share."""
        if self.latent is None:
            return self.n_layers * (self.key_width + self.value_width)
        return self.n_layers * (self.latent.kv_rank + self.latent.rope_dim)

    def _parameters(self, experts_counted: int) -> int:
        moe = self.router_parameters + experts_counted * self.expert_parameters + self.shared_expert_parameters
        mlps = self.n_moe_layers * moe + (self.n_layers - self.n_moe_layers) * self.dense_mlp_parameters
        layers = self.n_layers * (self.attention_parameters + 2 * self.hidden)
        embeddings = self.vocab * self.hidden * (1 if self.tied_embeddings else 2)
        return layers + mlps + embeddings + self.hidden


def find_shape(model: str) -> PlanShape:
    """The shape of `model`: a name that ships (`Qwen3-8B`, `Qwen/Qwen3-8B`), a model folder, or a `config.json`.

    A variant that was trained further (`Qwen3-8B-Base`, `Qwen2.5-7B-Instruct`) has the shape of its model.

    Raises:
        ValueError: nothing of that name, or a model whose sizes cannot be read.
    """
    file = Path(model).expanduser()
    if model.startswith(PACKAGE_PREFIX):
        file = Path(resolve_model_path(model))
    if file.is_dir():
        file /= "config.json"
    if file.is_file():
        return read_shape(file, name=file.parent.name if file.name == "config.json" else file.stem)
    name = _VARIANT.sub("", model.rsplit("/", 1)[-1].removeprefix("Meta-"))
    shipped = {path.stem.lower(): path for path in sorted(SHAPES.glob("*.json"))}
    if name.lower() in shipped:
        path = shipped[name.lower()]
        return read_shape(path, name=path.stem)
    near = difflib.get_close_matches(name.lower(), shipped, n=1, cutoff=0.5)
    hint = f"did you mean {shipped[near[0]].stem}? " if near else ""
    raise ValueError(
        f"no shape is known for the model {model!r}: {hint}Give a model folder, its config.json, "
        f"or one of {', '.join(path.stem for path in shipped.values())}"
    )


@cache
def read_shape(file: Path, name: str) -> PlanShape:
    """The shape in a Hugging Face `config.json`.

    Raises:
        ValueError: a file that is not a JSON object, or a model whose sizes cannot be read.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds a {type(config).__name__}; a model's configuration is an object")
    if config.get("model_type") in LATENT_FAMILIES:
        return _latent_shape(config, name)
    return PlanShape.of(ModelShape.from_hf(config), name)


def _latent_shape(config: Mapping[str, Any], name: str) -> PlanShape:
    """DeepSeek-V3 and its kin: the first layers dense, then MoE with shared experts, MLA throughout."""

    def size(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{config['model_type']}: config.json has {key}={value!r}; it must be a whole number")
        return value

    latent = LatentAttention(
        query_rank=size("q_lora_rank"),
        kv_rank=size("kv_lora_rank"),
        nope_dim=size("qk_nope_head_dim"),
        rope_dim=size("qk_rope_head_dim"),
        value_dim=size("v_head_dim"),
    )
    n_layers, n_dense = size("num_hidden_layers"), size("first_k_dense_replace")
    return PlanShape(
        family=config["model_type"],
        n_layers=n_layers,
        hidden=size("hidden_size"),
        n_heads=size("num_attention_heads"),
        n_kv_heads=size("num_attention_heads"),
        head_dim=latent.nope_dim + latent.rope_dim,
        ffn_hidden=size("intermediate_size"),
        vocab=size("vocab_size"),
        max_positions=size("max_position_embeddings"),
        n_experts=size("n_routed_experts"),
        top_k=size("num_experts_per_tok"),
        expert_ffn_hidden=size("moe_intermediate_size"),
        shared_expert_ffn_hidden=size("n_shared_experts") * size("moe_intermediate_size"),
        moe_layers=tuple(layer >= n_dense for layer in range(n_layers)),
        norm_topk_prob=bool(config.get("norm_topk_prob", True)),
        qkv_bias=False,
        qk_norm=False,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        rms_norm_eps=as_number(config["model_type"], "rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
        rope_theta=as_number(config["model_type"], "rope_theta", config.get("rope_theta", 1e4)),
        rope_scaling=None,
        name=name,
        latent=latent,
    )
