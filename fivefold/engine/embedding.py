"""What embeddings are multiplied by before the first layer, in models that scale them."""

from __future__ import annotations

import torch


def embedding_scale(hidden: int, dtype: torch.dtype) -> float:
    """Return sqrt(hidden), rounded to the dtype of the model as in transformers."""
    return float(torch.tensor(hidden**0.5, dtype=dtype, device="cpu"))
