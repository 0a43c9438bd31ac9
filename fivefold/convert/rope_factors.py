"""Llama 3's scaling of rotary positions: GGUF has the factors, a config.json the numbers that they follow from.

rope_freqs.weight [head_dim / 2]    what each frequency is divided by    ──>    rope_scaling, of type llama3
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fivefold.engine.rope import inverse_frequencies
from fivefold.families.read import read_shape

ROPE_FACTORS = "rope_freqs.weight"
_PUBLISHED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Numbers of Llama 3.1 to 3.3, which GGUF does not hold."""


def with_rope_scaling(config: Mapping[str, Any], factors_D: Tensor) -> dict[str, Any]:
    """Return `config` with the scaling that leads to factors of its frequencies.

    Raises:
        ValueError: they belong to none of Llama 3.1 to 3.3.
    """
    scaling = {"rope_type": "llama3", "factor": round(float(factors_D.max()), 4), **_PUBLISHED}
    scaled = {**config, "rope_scaling": scaling}
    plain_D, divided_D = (inverse_frequencies(read_shape(each), torch.device("cpu")) for each in (config, scaled))
    if factors_D.shape != plain_D.shape or not torch.allclose(factors_D, plain_D / divided_D, rtol=1e-4):
        raise ValueError(
            f"{ROPE_FACTORS} does not hold the factors of Llama 3.1 to 3.3, and config.json has no other ones: the "
            "file cannot be converted"
        )
    return scaled
