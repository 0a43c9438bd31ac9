"""Conversions of one value: from what a framework's key holds to what the recipe's key takes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

Convert = Callable[[Any], Any]
"""Returns the recipe's value for a value of the source; raises `Unfit` for a value that the recipe cannot take."""

LARGEST_TOP_K = 10_000_000
"""A `top_k` of this size or more is larger than any vocabulary, so it cuts nothing off."""


class Unfit(ValueError):
    """A value that the recipe's key cannot take; the message says what the key takes."""


def whole(value: Any) -> int:
    """Return a whole number; 4.0 counts as one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value % 1:
        raise Unfit(f"{value!r} is not a whole number")
    return int(value)


def positive(value: Any) -> int:
    """Return a whole number that is at least 1."""
    if whole(value) < 1:
        raise Unfit(f"{value!r} is not a whole number of at least 1")
    return int(value)


def rounded_up(value: Any) -> int:
    """Return the smallest whole number that is not below a number."""
    return math.ceil(number(value))


def number(value: Any) -> float:
    """Return a number as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unfit(f"{value!r} is not a number")
    return float(value)


def above_zero(value: Any) -> float:
    """Return a number above 0."""
    if number(value) <= 0:
        raise Unfit(f"{value!r} is not above 0")
    return float(value)


def rate(value: Any) -> float:
    """Return a probability below 1."""
    if not 0 <= number(value) < 1:
        raise Unfit(f"{value!r} is not a probability below 1")
    return float(value)


def flag(value: Any) -> bool:
    """Return true or false."""
    if not isinstance(value, bool):
        raise Unfit(f"{value!r} is neither true nor false")
    return value


def text(value: Any) -> str:
    """Return a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise Unfit(f"{value!r} is not a text")
    return value


def one_of(**names: Any) -> Convert:
    """Return a conversion that looks a name up in `names`; case is ignored, and `-` is read as `_`."""

    def convert(value: Any) -> Any:
        name = str(value).replace("-", "_").lower()
        if name not in names:
            raise Unfit(f"{value!r} is not offered; there are {', '.join(names)}")
        return names[name]

    return convert


def texts(value: Any) -> list[str]:
    """Return a text, or a list of texts, as a list."""
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def whole_numbers(value: Any) -> list[int]:
    """Return a whole number, or a list of whole numbers, as a list."""
    return [whole(item) for item in value] if isinstance(value, list) else [whole(value)]


def run_name(value: Any) -> str:
    """Return a name for a run's folder: characters that a folder's name should not have become `-`."""
    name = re.sub(r"[^\w.-]+", "-", str(value)).strip("-.")
    if not name:
        raise Unfit(f"{value!r} has no character that a folder's name can have")
    return name


def top_k(value: Any) -> int:
    """Return how many tokens are sampled from; 0 means all of them, which other frameworks write as -1."""
    k = whole(value)
    return k if 0 < k < LARGEST_TOP_K else 0


LOSS_AGGREGATION = one_of(
    token_mean="token_mean",
    seq_mean_token_mean="sequence_mean",
    seq_mean_token_sum="sequence_sum",
    seq_mean_token_sum_norm="sequence_sum_fixed",
)
KL_ESTIMATOR = one_of(
    kl="k1",
    k1="k1",
    mse="k2",
    k2="k2",
    k3="k3",
    low_var_kl="k3",
    abs="abs",
    # The value of another estimator with the gradient of k2.
    **{f"{name}+": "k2" for name in ("kl", "k1", "mse", "k2", "k3", "low_var_kl", "abs")},
)
LR_SCHEDULE = one_of(
    constant="constant", constant_with_warmup="constant", linear="linear", cosine="cosine", wsd="wsd", WSD="wsd"
)
DTYPE = one_of(
    **dict.fromkeys(("bfloat16", "bf16", "torch_bfloat16"), "bfloat16"),
    **dict.fromkeys(("float32", "fp32", "float"), "float32"),
    **dict.fromkeys(("float16", "fp16", "half"), "float16"),
)
STATE_PLACE = one_of(true="host", false="device")
ROLLOUT_ENGINE = one_of(vllm="vllm", vllm_async="vllm", sglang="sglang", hf="transformers", hf_infer="transformers")
