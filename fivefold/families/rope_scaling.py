"""How rotary positions reach beyond the context that a model was trained with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context.

    `linear` divides every frequency by `factor`; `llama3` and `yarn` divide the low ones, keep the high ones, and blend
    between (Llama 3, https://arxiv.org/abs/2407.21783; YaRN, https://arxiv.org/abs/2309.00071). Fields that a type does
    not use keep their defaults.
    """

    type: str
    factor: float
    low_freq_factor: float = 0.0
    """`llama3`: wavelengths of more than the original context over this factor are divided."""
    high_freq_factor: float = 0.0
    """`llama3`: wavelengths of less than the original context over this factor are kept."""
    original_max_position_embeddings: int = 0
    beta_fast: float = 0.0
    """`yarn`: frequencies that turn more often than this in the original context are kept."""
    beta_slow: float = 0.0
    """`yarn`: frequencies that turn less often than this in the original context are divided."""
    truncate: bool = True
    """`yarn`: whether the range between the two is rounded outwards to whole pairs of channels."""
    magnitude: float = 1.0
    """`yarn`: factor of all cosines and sines."""
