"""Routes of tokens: the experts to which a MoE's layers send them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fivefold.types import MOST_IN_A_BYTE, UNKNOWN_EXPERT, Routes


def route_dtype(n_experts: int) -> torch.dtype:
    """Return the dtype of routes of so many experts."""
    return torch.int8 if n_experts <= MOST_IN_A_BYTE else torch.int16


def padded_routes(parts: Sequence[npt.NDArray[Any]], n_tokens: int, dtype: torch.dtype) -> Routes:
    """Return routes that lie end to end, with tokens at the end whose experts are not known, `n_tokens` in all.

    Args:
        parts: integers [tokens, MoE layers, top_k] each.
        n_tokens: number of tokens.
        dtype: the routes' own; see `route_dtype`.
    """
    known = np.concatenate(parts)
    routes = torch.full((n_tokens, *known.shape[1:]), UNKNOWN_EXPERT, dtype=dtype).numpy()
    routes[: len(known)] = known
    return routes
