"""Rotary positions in a `config.json`: under `rope_parameters`, or under the older `rope_theta` and `rope_scaling`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fivefold.families.hf_config import HFConfig
from fivefold.families.rope_scaling import RopeScaling

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Fields that each supported type must state."""


def read_rope(
    config: HFConfig, *, is_partial: bool = False, kind: str | None = None
) -> tuple[float, RopeScaling | None]:
    """Return theta and the scaling; None where the frequencies are not scaled.

    Args:
        config: the model's config.json.
        is_partial: whether the family turns a part of the channels only (`rotary_part`).
        kind: the kind of layer, in a family where the kinds have different positions.

    Raises:
        ValueError: a type or feature that is not supported, or a field that is missing or not a number.
    """
    rope = config.fields("rope_scaling") or config.fields("rope_parameters")
    if kind is not None and any(isinstance(value, Mapping) for value in rope.values()):
        rope = rope.get(kind) or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise config.error(f"rotary positions that differ by layer type ({', '.join(rope)}) are not supported")
    stated = rope.get("rope_theta", config.get("rope_theta"))
    partial = _partial_factor(config, rope)
    if partial not in (None, 1) and not is_partial:
        raise config.error(f"partial_rotary_factor={partial} is not supported; it must be 1")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "mrope":  # Qwen2.5-VL's files call it so that images have separate positions
        rope_type = "default"
    if not isinstance(rope_type, str) or rope_type not in _NEEDED:
        raise config.error(f"rope type {rope_type!r} is not supported; use one of {', '.join(_NEEDED)}")
    return _positive(config, "rope_theta", stated), _scaling(config, rope_type, rope)


def local_theta(config: HFConfig) -> float:
    """Return theta of the layers with a sliding window, where it differs from other layers'.

    Raises:
        ValueError: it is not a number above 0, or their frequencies are scaled.
    """
    own = config.fields("rope_parameters").get("sliding_attention")
    rope = own if isinstance(own, Mapping) else {}
    if (rope_type := rope.get("rope_type", "default")) != "default":
        raise config.error(f"rope type {rope_type!r} of sliding_attention is not supported; it must be default")
    return _positive(config, "rope_local_base_freq", rope.get("rope_theta", config.get("rope_local_base_freq")))


def _positive(config: HFConfig, key: str, value: Any) -> float:
    number = config.as_number(key, value)
    if number <= 0:
        raise config.error(f"config.json has {key}={value!r}; it must be greater than 0")
    return number


def rotary_part(config: HFConfig, head_dim: int) -> int:
    """Return how many channels of a head rotary positions turn: a share that the file gives.

    Raises:
        ValueError: a share that is no number, or an odd number of channels.
    """
    rope = config.fields("rope_scaling") or config.fields("rope_parameters")
    share = config.as_number("partial_rotary_factor", _partial_factor(config, rope))
    channels = int(head_dim * share)
    if not 0 < channels <= head_dim or channels % 2:
        raise config.error(
            f"partial_rotary_factor={share:g} turns {channels} of a head's {head_dim} channels; they must be an even "
            "number"
        )
    return channels


def channels_of(config: HFConfig, head_dim: int) -> int:
    """Return the same where a file may give the number of channels (`rotary_dim`) in place of the share.

    Raises:
        ValueError: as `rotary_part`; or a number that is odd, or greater than the head's.
    """
    rope = config.fields("rope_scaling") or config.fields("rope_parameters")
    is_stated = "partial_rotary_factor" in rope or config.states("partial_rotary_factor")
    if is_stated or not config.states("rotary_dim"):
        return rotary_part(config, head_dim)
    channels = config.integer("rotary_dim")
    if channels > head_dim or channels % 2:
        raise config.error(f"rotary_dim={channels} must be an even number of a head's {head_dim} channels")
    return channels


def _partial_factor(config: HFConfig, rope: Mapping[str, Any]) -> Any:
    return rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))


def _scaling(config: HFConfig, rope_type: str, rope: Mapping[str, Any]) -> RopeScaling | None:
    if rope_type == "default":
        return None
    if missing := [name for name in _NEEDED[rope_type] if rope.get(name) is None]:
        raise config.error(f"rope type {rope_type} needs {', '.join(missing)} in config.json")
    factor = _positive(config, "factor", rope["factor"])
    if rope_type == "linear":
        return RopeScaling(rope_type, factor)
    if rope_type == "yarn":
        return _yarn(config, factor, rope)
    return RopeScaling(
        rope_type,
        factor,
        low_freq_factor=config.as_number("low_freq_factor", rope["low_freq_factor"]),
        high_freq_factor=config.as_number("high_freq_factor", rope["high_freq_factor"]),
        original_max_position_embeddings=_trained_positions(config, rope),
    )


def _yarn(config: HFConfig, factor: float, rope: Mapping[str, Any]) -> RopeScaling:
    def number(key: str, otherwise: float) -> float:
        return config.as_number(key, rope[key]) if rope.get(key) is not None else otherwise

    mscale, mscale_all = number("mscale", 0.0), number("mscale_all_dim", 0.0)
    magnitude = _magnitude(factor)
    if mscale and mscale_all:
        magnitude = _magnitude(factor, mscale) / _magnitude(factor, mscale_all)
    return RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=_trained_positions(config, rope),
        # transformers takes its defaults in the place of 0 too.
        beta_fast=number("beta_fast", 0.0) or 32.0,
        beta_slow=number("beta_slow", 0.0) or 1.0,
        truncate=bool(rope.get("truncate", True)),
        magnitude=number("attention_factor", magnitude),
    )


def _magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return by how much YaRN scales queries and keys for a context that is `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def score_factor(config: HFConfig) -> float:
    """Return the factor by which DeepSeek's models scale attention scores where YaRN stretches their positions.

    Raises:
        ValueError: a field that is not a number.
    """
    rope = config.fields("rope_scaling") or config.fields("rope_parameters")
    if rope.get("rope_type", rope.get("type", "default")) == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    factor, mscale = (config.as_number(key, rope.get(key)) for key in ("factor", "mscale_all_dim"))
    return _magnitude(factor, mscale) ** 2


def _trained_positions(config: HFConfig, rope: Mapping[str, Any]) -> int:
    """Return the context length before scaling, which files state at the top, inside, or not at all."""
    key = "original_max_position_embeddings"
    if config.states(key):
        return config.integer(key)
    return config.as_integer(key, rope.get(key, config.get("max_position_embeddings")))
