"""Attention sinks for kernels that know of none, in training and in the embedded rollout."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_SINK_CHANNELS = 8
"""Channels that sinks take, though they use one: kernels want widths that are multiples of 8."""


def with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return attention's inputs with the sinks as a key more, whose value is 0, for kernels that know of none.

    Queries and keys get channels more. The first is a head's sink over `scale`, and 1 for the new key alone.

    Args:
        query: [B, heads, Q, d].
        key: [B, kv_heads, K, d].
        value: [B, kv_heads, K, v].
        mask: which pairs attend, bool [B, 1, Q, K].
        sinks: [heads, Q], or [heads, 1] for all queries of a head.
        scale: what the products of queries and keys are multiplied by.

    Returns:
        Queries, keys, values and the mask: [B, heads, Q, d + 8], [B, kv_heads, K + 1, d + 8], [B, kv_heads, K + 1, v]
        and [B, 1, Q, K + 1].
    """
    score = (sinks / scale).to(query.dtype)[None, :, :, None]
    query = torch.cat((query, F.pad(score, (0, _SINK_CHANNELS - 1)).expand(*query.shape[:-1], -1)), dim=-1)
    is_sink = F.one_hot(torch.tensor(key.shape[-1], device=key.device), key.shape[-1] + _SINK_CHANNELS).to(key.dtype)
    key = torch.cat((F.pad(key, (0, _SINK_CHANNELS)), is_sink.expand(*key.shape[:2], 1, -1)), dim=2)
    return query, key, F.pad(value, (0, 0, 0, 1)), F.pad(mask, (0, 1), value=True)
