"""Reading a Hugging Face `config.json`: its spellings, its defaults, and the features that are refused.

Defaults are those of transformers for keys that real files leave out. Sizes have none: a file without them is broken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T", int, str)

DENSE_FAMILIES = ("llama", "qwen2", "qwen3")
MOE_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
FAMILIES = DENSE_FAMILIES + MOE_FAMILIES

ROPE_TYPES = ("default", "linear", "llama3")

DEFAULTS: dict[str, Any] = {
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-6,
    "decoder_sparse_step": 1,
    "qkv_bias": True,
    "rope_theta": 1e4,
}
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen3": {"head_dim": 128},
}


def as_number(family: str, key: str, value: Any) -> float:
    """`value`, which a config.json of `family` gives `key`, as a float.

    Raises:
        ValueError: it is no number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{family}: config.json has {key}={value!r}; it must be a number")
    return float(value)


class HFConfig:
    """Typed access to one parsed `config.json`; every error names the key and the family."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw
        family = raw.get("model_type")
        if family not in FAMILIES:
            raise ValueError(f"model_type is {family!r}; the supported families are {', '.join(FAMILIES)}")
        self.family: str = family

    def _get(self, key: str) -> Any:
        if key in self._raw:
            return self._raw[key]
        default = FAMILY_DEFAULTS.get(self.family, {}).get(key, DEFAULTS.get(key))
        if default is None:
            raise ValueError(f"{self.family}: config.json has no {key}")
        return default

    def integer(self, key: str, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(
                f"{self.family}: config.json has {key}={value!r}; it must be a whole number of at least {least}"
            )
        return value

    def number(self, key: str) -> float:
        """A number, as a float."""
        return as_number(self.family, key, self._get(key))

    def flag(self, key: str) -> bool:
        """true or false."""
        value = self._get(key)
        if not isinstance(value, bool):
            raise ValueError(f"{self.family}: config.json has {key}={value!r}; it must be true or false")
        return value

    def items(self, key: str, kind: type[T]) -> list[T]:
        """A list of `kind`; a key that is left out or null means an empty one."""
        value = self._raw.get(key)
        items = [] if value is None else value
        if not isinstance(items, list) or any(type(item) is not kind for item in items):
            what = {int: "whole numbers", str: "texts"}[kind]
            raise ValueError(f"{self.family}: config.json has {key}={value!r}; it must be a list of {what}")
        return items

    def fields(self, key: str) -> Mapping[str, Any]:
        """An object; a key that is left out or null means an empty one."""
        value = self._raw.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ValueError(f"{self.family}: config.json has {key}={value!r}; it must be an object or null")
        return value or {}

    def n_kv_heads(self, n_heads: int) -> int:
        """Key/value heads: null, and for old Llama files absence, mean as many as query heads."""
        is_implied = "num_key_value_heads" not in self._raw and self.family == "llama"
        if is_implied or self._get("num_key_value_heads") is None:
            return n_heads
        n_kv_heads = self.integer("num_key_value_heads")
        if n_heads % n_kv_heads:
            raise ValueError(
                f"{self.family}: num_attention_heads={n_heads} is not a multiple of num_key_value_heads={n_kv_heads}, "
                "so the query heads cannot be grouped"
            )
        return n_kv_heads

    def head_dim(self, hidden: int, n_heads: int) -> int:
        """Width of a head: hidden / n_heads unless the file or the family says otherwise."""
        has_own = self._raw.get("head_dim") is not None
        if has_own or ("head_dim" not in self._raw and self.family == "qwen3"):
            head_dim = self.integer("head_dim")
        elif hidden % n_heads:
            raise ValueError(
                f"{self.family}: without head_dim, hidden_size={hidden} must be a multiple of "
                f"num_attention_heads={n_heads}"
            )
        else:
            head_dim = hidden // n_heads
        if head_dim % 2:
            raise ValueError(
                f"{self.family}: the head width is {head_dim}; rotary positions turn pairs, so it must be even"
            )
        return head_dim

    def moe_layers(self, n_layers: int) -> tuple[bool, ...]:
        """Which layers have experts, from `decoder_sparse_step` and `mlp_only_layers`."""
        if self.family in DENSE_FAMILIES:
            return (False,) * n_layers
        if self.family == "mixtral":
            return (True,) * n_layers
        step = self.integer("decoder_sparse_step")
        dense = self.items("mlp_only_layers", int)
        has_experts = self.n_experts(least=0) > 0
        return tuple(has_experts and layer not in dense and (layer + 1) % step == 0 for layer in range(n_layers))

    def n_experts(self, least: int = 1) -> int:
        """Routed experts of a layer, under either of the two names in use."""
        names = [name for name in ("num_experts", "num_local_experts") if name in self._raw]
        counts = {self.integer(name, least) for name in names}
        if len(counts) > 1:
            raise ValueError(
                f"{self.family}: num_experts={self._raw['num_experts']} and "
                f"num_local_experts={self._raw['num_local_experts']} differ"
            )
        if not counts:
            raise ValueError(f"{self.family}: config.json has neither num_experts nor num_local_experts")
        n_experts = counts.pop()
        if n_experts and (top_k := self.integer("num_experts_per_tok")) > n_experts:
            raise ValueError(f"{self.family}: num_experts_per_tok={top_k} exceeds the {n_experts} experts of a layer")
        return n_experts

    def expert_width(self) -> int:
        """Hidden width of one routed expert."""
        return self.integer("intermediate_size" if self.family == "mixtral" else "moe_intermediate_size")

    def shared_expert_width(self) -> int:
        """Hidden width of the shared expert; 0: none."""
        return self.integer("shared_expert_intermediate_size", least=0) if self.family == "qwen2_moe" else 0

    def norm_topk_prob(self) -> bool:
        """Whether the chosen experts' weights are scaled to sum to 1. Mixtral always does."""
        return self.family == "mixtral" or (self.family in MOE_FAMILIES and self.flag("norm_topk_prob"))

    def qkv_bias(self) -> bool:
        """Whether Q, K and V have biases (and the output projection none)."""
        return self.family == "qwen2" or (self.family == "qwen2_moe" and self.flag("qkv_bias"))

    def rope(self) -> tuple[float, dict[str, Any] | None]:
        """(theta, fields of the scaling or None), from `rope_parameters` or the older two keys."""
        rope = self.fields("rope_scaling") or self.fields("rope_parameters")
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise ValueError(
                f"{self.family}: rotary positions that differ by layer type ({', '.join(rope)}) are not supported"
            )
        theta = (
            as_number(self.family, "rope_theta", rope["rope_theta"])
            if "rope_theta" in rope
            else self.number("rope_theta")
        )
        partial = rope.get("partial_rotary_factor", self._raw.get("partial_rotary_factor"))
        if partial not in (None, 1):
            raise ValueError(f"{self.family}: partial_rotary_factor={partial} is not supported; it must be 1")
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in ROPE_TYPES:
            raise ValueError(
                f"{self.family}: rope type {rope_type!r} is not supported; use one of {', '.join(ROPE_TYPES)}"
            )
        return theta, self._scaling(rope_type, rope)

    def _scaling(self, rope_type: str, rope: Mapping[str, Any]) -> dict[str, Any] | None:
        if rope_type == "default":
            return None
        needed = ("factor",) if rope_type == "linear" else ("factor", "low_freq_factor", "high_freq_factor")
        missing = [name for name in needed if rope.get(name) is None]
        if missing:
            raise ValueError(f"{self.family}: rope type {rope_type} needs {', '.join(missing)} in config.json")
        scaling: dict[str, Any] = {
            "type": rope_type,
            **{name: as_number(self.family, name, rope[name]) for name in needed},
        }
        if rope_type == "llama3":
            inner = rope.get("original_max_position_embeddings", self._raw.get("max_position_embeddings"))
            scaling["original_max_position_embeddings"] = self._raw.get("original_max_position_embeddings", inner)
        return scaling

    def refuse_unsupported(self) -> None:
        """ValueError for a feature that would change the model's outputs and is not implemented."""
        activation = self._raw.get("hidden_act", "silu")
        if activation != "silu":
            raise ValueError(f"{self.family}: hidden_act={activation!r} is not supported; the MLPs are SwiGLU (silu)")
        if self.family != "qwen2" and self.flag("attention_bias"):
            raise ValueError(
                f"{self.family}: attention_bias=true (a bias on the output projection as well) is not supported"
            )
        if self.flag("mlp_bias"):
            raise ValueError(f"{self.family}: mlp_bias=true is not supported")
        if self._uses_sliding_window():
            raise ValueError(
                f"{self.family}: attention over sliding_window={self._raw.get('sliding_window')} tokens is in use; "
                "it is not supported: every layer attends to the whole sequence"
            )

    def _uses_sliding_window(self) -> bool:
        if "sliding_attention" in self.items("layer_types", str):
            return True
        if not self._raw.get("sliding_window"):
            return False
        if self.family in ("mixtral", "llama"):
            return self.family == "mixtral"
        if not self.flag("use_sliding_window"):
            return False
        if self.family in ("qwen2", "qwen3") and "layer_types" not in self._raw:
            # Layers below max_window_layers attend to everything.
            return self.integer("num_hidden_layers") > self.integer("max_window_layers", least=0)
        return True
