"""Causal attention over entries of uneven length.

An entry is a run of queries that are the *last* tokens of its keys: query i of n sees keys 0 .. n_keys - n + i. A whole
sequence is an entry with as many keys as queries; a chunk of a context-parallel sequence has more keys.

On CUDA in half precision one call of flash attention does it (`flash.py`). Elsewhere entries of similar length are
padded to rectangles for `scaled_dot_product_attention`; a rectangle wastes at most half of its rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fivefold.config.schema.engine import FlashAttention
from fivefold.engine.kernels.flash import FlashPlan, flash_attention


@dataclass(frozen=True)
class Rectangle:
    """B entries padded to Q queries and K keys."""

    query_rows_BQ: torch.Tensor
    """int64: index of each query among all queries; padding repeats the entry's first."""
    key_rows_BK: torch.Tensor
    """int64: the same for keys."""
    valid_BQ: torch.Tensor
    """bool: rows that are queries and not padding."""
    mask_B1QK: torch.Tensor | None
    """bool: pairs that attend. None: plain causal attention, because every entry has as many keys as queries."""


@dataclass(frozen=True)
class PaddedPlan:
    """Plan for `scaled_dot_product_attention`: all entries, in rectangles."""

    rectangles: tuple[Rectangle, ...]
    restore_T: torch.Tensor
    """int64 [T]: for each query token, its row among the rectangles' valid rows laid end to end."""


AttentionPlan = FlashPlan | PaddedPlan


def plan_attention(
    entries: Sequence[tuple[int, int]], *, flash: FlashAttention | None, device: torch.device
) -> AttentionPlan:
    """Plan the attention of `entries`, (number of queries, number of keys) each, which are laid end to end.

    Without `flash`, the plan is for `scaled_dot_product_attention`.
    """
    queries, keys = torch.tensor(entries, dtype=torch.int64).T
    return _plan_rectangles(queries, keys, device) if flash is None else FlashPlan.of(flash, queries, keys, device)


def _plan_rectangles(queries: torch.Tensor, keys: torch.Tensor, device: torch.device) -> PaddedPlan:
    query_starts, key_starts = queries.cumsum(0) - queries, keys.cumsum(0) - keys
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, (n_queries, n_keys) in enumerate(zip(queries.tolist(), keys.tolist(), strict=True)):
        groups[n_queries.bit_length(), n_keys.bit_length()].append(index)
    rectangles, order = [], []
    for members in groups.values():
        rows = torch.tensor(members)
        rectangle, tokens = _rectangle(queries[rows], keys[rows], query_starts[rows], key_starts[rows], device)
        rectangles.append(rectangle)
        order.append(tokens)
    restore = torch.empty(int(queries.sum()), dtype=torch.int64)
    restore[torch.cat(order)] = torch.arange(restore.numel())
    return PaddedPlan(tuple(rectangles), restore.to(device))


def _rectangle(
    queries_B: torch.Tensor,
    keys_B: torch.Tensor,
    query_starts_B: torch.Tensor,
    key_starts_B: torch.Tensor,
    device: torch.device,
) -> tuple[Rectangle, torch.Tensor]:
    query_Q, key_K = torch.arange(int(queries_B.max())), torch.arange(int(keys_B.max()))
    valid_BQ = query_Q < queries_B[:, None]
    valid_BK = key_K < keys_B[:, None]
    query_rows = torch.where(valid_BQ, query_starts_B[:, None] + query_Q, query_starts_B[:, None])
    key_rows = torch.where(valid_BK, key_starts_B[:, None] + key_K, key_starts_B[:, None])
    mask = None
    if not torch.equal(queries_B, keys_B):
        last_key_BQ = (keys_B - queries_B)[:, None] + query_Q
        mask = (key_K <= last_key_BQ[:, :, None]).unsqueeze(1).to(device)
    rectangle = Rectangle(query_rows.to(device), key_rows.to(device), valid_BQ.to(device), mask)
    return rectangle, query_rows[valid_BQ]


def varlen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan, scale: float | None = None
) -> torch.Tensor:
    """Attend from query [T, heads, d] to key [K, kv_heads, d] and value [K, kv_heads, v], causally within each entry.

    The scores are multiplied by `scale`; None: 1 / sqrt(d).

    Returns:
        [T, heads, v].
    """
    if isinstance(plan, FlashPlan):
        return flash_attention(query, key, value, plan, scale)
    outputs = [_rectangle_attention(query, key, value, rectangle, scale) for rectangle in plan.rectangles]
    return torch.cat(outputs).index_select(0, plan.restore_T)


def _rectangle_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rectangle: Rectangle, scale: float | None
) -> torch.Tensor:
    """Return the output of one rectangle's queries without padding, [queries, heads, v]."""
    output_BHQD = F.scaled_dot_product_attention(
        query[rectangle.query_rows_BQ].transpose(1, 2),
        key[rectangle.key_rows_BK].transpose(1, 2),
        value[rectangle.key_rows_BK].transpose(1, 2),
        attn_mask=rectangle.mask_B1QK,
        is_causal=rectangle.mask_B1QK is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output_BHQD.transpose(1, 2)[rectangle.valid_BQ]
