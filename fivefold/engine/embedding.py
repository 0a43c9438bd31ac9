"""What embeddings are multiplied by before the first layer."""

from __future__ import annotations

import torch

from fivefold.families.shape import ModelShape


def embedding_scale(shape: ModelShape, dtype: torch.dtype) -> float:
    """Return the factor, rounded to the model's dtype as in transformers; 1 where there is none."""
    if not shape.scaled_embedding:
        return 1.0
    return float(torch.tensor(shape.hidden**0.5, dtype=dtype, device="cpu"))
