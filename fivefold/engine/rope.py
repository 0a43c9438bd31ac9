"""Rotary position embeddings on packed tokens, as Hugging Face computes them (half-rotation, cos/sin in fp32)."""

from __future__ import annotations

import math

import torch

from fivefold.families.shape import ModelShape, RopeScaling


def inverse_frequencies(shape: ModelShape, device: torch.device) -> torch.Tensor:
    """Return the rotation of each channel pair, in radians per position (Su et al. 2021, eq. 15): [rotated / 2]."""
    rotated = shape.rotary_dim or shape.head_dim
    exponents = torch.arange(0, rotated, 2, dtype=torch.int64).to(device=device, dtype=torch.float32)
    frequencies = 1.0 / (shape.rope_theta ** (exponents / rotated))
    return frequencies if shape.rope_scaling is None else _scale(frequencies, shape.rope_scaling)


def _scale(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow rotations down for a longer context: `linear` all of them, `llama3` only those of long wavelengths."""
    if scaling.type == "linear":
        return frequencies / scaling.factor
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
    shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
    smooth = (scaling.original_max_position_embeddings / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelengths > longest, frequencies / scaling.factor, frequencies)
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), blended, scaled)


def cos_sin(
    positions_T: torch.Tensor, frequencies: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, `dtype` [T, 1, rotated channels] each, at the positions int64 [T]."""
    angles = positions_T.float()[:, None] * frequencies[None, :]
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)
