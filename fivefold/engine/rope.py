"""The frequencies of rotary position embeddings, as Hugging Face computes them."""

from __future__ import annotations

import math

import torch

from fivefold.families.rope_scaling import RopeScaling
from fivefold.families.shape import ModelShape


def inverse_frequencies(shape: ModelShape, device: torch.device) -> torch.Tensor:
    """Return the rotation of each channel pair, in radians per position (Su et al. 2021, eq. 15): [rotated / 2]."""
    scaling = shape.rope_scaling
    periods = _periods(shape.rope_theta, shape.rotated_channels, device)
    frequencies = 1.0 / periods
    if scaling is None:
        return frequencies
    if scaling.type == "linear":
        return frequencies / scaling.factor
    return _llama3(frequencies, scaling) if scaling.type == "llama3" else _yarn(periods, shape.rope_theta, scaling)


def local_frequencies(shape: ModelShape, device: torch.device) -> torch.Tensor | None:
    """Return the same of layers with a sliding window; None: they are other layers'."""
    if shape.local_rope_theta is None:
        return None
    return 1.0 / _periods(shape.local_rope_theta, shape.rotated_channels, device)


def _periods(theta: float, rotated: int, device: torch.device) -> torch.Tensor:
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).to(device=device, dtype=torch.float32)
    periods: torch.Tensor = theta ** (exponents / rotated)
    return periods


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow down the rotations of long wavelengths, for a longer context."""
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
    shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
    smooth = (scaling.original_max_position_embeddings / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), blended, scaled)


def _yarn(periods: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Slow down the rotations of the channel pairs that turn seldom in the original context (Peng et al. 2023)."""
    n_pairs = len(periods)

    def pair(turns: float) -> float:
        """Return the (fractional) index of the pair that makes so many turns in the original context."""
        return n_pairs * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * n_pairs - 1)
    indices = torch.arange(n_pairs, dtype=torch.float32, device=periods.device)
    # A range of one pair would divide by 0; transformers widens it by the same amount.
    kept = 1 - ((indices - first) / ((last - first) or 0.001)).clamp(0, 1)
    return 1.0 / (scaling.factor * periods) * (1 - kept) + 1.0 / periods * kept
