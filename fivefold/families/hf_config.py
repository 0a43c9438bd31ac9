"""Typed access to a parsed Hugging Face `config.json`.

    value of a key  =  what the file says, else the family's default, else `DEFAULTS`, else an error

Keys that real files leave out have the defaults of transformers. Sizes have none: a file without them is broken.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from fivefold.config.limits import LARGEST

T = TypeVar("T", int, str)

DEFAULTS: Mapping[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "head_dim": None,
    "hidden_act": "silu",
    "mlp_bias": False,
    "norm_topk_prob": False,
    "partial_rotary_factor": None,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
"""Values that hold for every family, unless the family has its own."""


_MOST = sys.float_info.max
MOST_LAYERS = 10_000
"""Most layers of a model; a shape lists them."""


class HFConfig:
    """One parsed `config.json`; every error names the family and the key.

    Args:
        raw: the parsed file.
        defaults: the family's own defaults. None as a default means that the key may be null or absent.
    """

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.family: str = raw["model_type"]
        self._raw = raw
        self._defaults = {**DEFAULTS, **defaults}

    def inside(self, key: str) -> HFConfig:
        """Return the config of the language model that the file holds under `key`.

        Raises:
            ValueError: the file holds no object there.
        """
        fields = self.fields(key)
        if not fields:
            raise self.error(f"config.json has no {key}, which describes the language model")
        # Only one of the two may say that the output layer is the embedding. transformers goes by the whole model's.
        tied = {name: self._raw[name] for name in ("tie_word_embeddings",) if name in self._raw}
        return HFConfig({**fields, **tied, "model_type": self.family}, self._defaults)

    def error(self, text: str) -> ValueError:
        """Return an error about this file, for the caller to raise."""
        return ValueError(f"{self.family}: {text}")

    def states(self, key: str) -> bool:
        """Return whether the file itself has `key`."""
        return key in self._raw

    def get(self, key: str) -> Any:
        """Return the value of `key`, of any type.

        Raises:
            ValueError: the file does not have the key, and neither the family nor `DEFAULTS` has a value for it.
        """
        if key in self._raw:
            return self._raw[key]
        if key not in self._defaults:
            raise self.error(f"config.json has no {key}")
        return self._defaults[key]

    def expect(self, values: Mapping[str, Any]) -> None:
        """Check keys that transformers does not read in this family, where it computes as if they had these values.

        Raises:
            ValueError: the file gives one of them another value.
        """
        for key, value in values.items():
            if self.states(key) and self._raw[key] != value:
                raise self.error(
                    f"{key}={_shown(self._raw[key])} is not supported; it must be {_shown(value)}, because "
                    "transformers does not read it"
                )

    def refuse(self, keys: Iterable[str]) -> None:
        """Check that features which are not implemented are off: null, false or not stated.

        Raises:
            ValueError: the file turns one on.
        """
        for key in keys:
            if (value := self._raw.get(key)) not in (None, False):
                raise self.error(f"{key}={_shown(value)} is not supported; it must be null")

    def integer(self, key: str, least: int = 1) -> int:
        """Return a whole number of at least `least`.

        Raises:
            ValueError: the key is missing, or its value is anything else.
        """
        return self.as_integer(key, self.get(key), least)

    def as_integer(self, key: str, value: Any, least: int = 1) -> int:
        """Return `value`, which the file gives `key` somewhere inside, if it is a whole number of at least `least`.

        Raises:
            ValueError: it is anything else, or larger than any model has.
        """
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(f"config.json has {key}={value!r}; it must be a whole number of at least {least}")
        most = MOST_LAYERS if key == "num_hidden_layers" else LARGEST
        if value > most:
            raise self.error(f"config.json has {key}={value}; it must be at most {most:,}")
        return value

    def number(self, key: str) -> float:
        """Return a number as a float.

        Raises:
            ValueError: the key is missing, or its value is not a number.
        """
        return self.as_number(key, self.get(key))

    def as_number(self, key: str, value: Any) -> float:
        """Return `value`, which the file gives `key` somewhere inside, as a float.

        Raises:
            ValueError: it is not a number, or not a finite one.
        """
        # NaN is within no bounds, and an integer may be too large for a float.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_MOST <= value <= _MOST:
            raise self.error(f"config.json has {key}={value!r}; it must be a number")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return true or false.

        Raises:
            ValueError: the key is missing, or its value is anything else.
        """
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.error(f"config.json has {key}={value!r}; it must be true or false")
        return value

    def items(self, key: str, kind: type[T]) -> list[T]:
        """Return a list of `kind`; a key that is absent or null means an empty list.

        Raises:
            ValueError: the value is not a list, or one of its items is not of `kind`.
        """
        value = self._raw.get(key)
        items = [] if value is None else value
        if not isinstance(items, list) or any(type(item) is not kind for item in items):
            what = {int: "whole numbers", str: "texts"}[kind]
            raise self.error(f"config.json has {key}={value!r}; it must be a list of {what}")
        return items

    def fields(self, key: str) -> Mapping[str, Any]:
        """Return an object; a key that is absent or null means the family's default, and without one an empty object.

        Raises:
            ValueError: the value is neither an object nor null.
        """
        value = self._raw.get(key) or self._defaults.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(f"config.json has {key}={value!r}; it must be an object or null")
        return value or {}


def _shown(value: Any) -> str:
    """Return a value as a message shows it: `true`, `'sigmoid'`, `2`."""
    return str(value).lower() if isinstance(value, bool) else repr(value)
