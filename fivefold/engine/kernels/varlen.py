"""Causal attention over entries of uneven length.

An entry is a run of queries that are the *last* tokens of its keys: query i of n sees keys 0 .. n_keys - n + i. A whole
sequence is an entry with as many keys as queries; a chunk of a context-parallel sequence has more keys. With a sliding
window, queries see the last ones of these keys alone.

A head's sink, in GPT-OSS, is a score with which a key without value takes part in each of its softmaxes.

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
from fivefold.sinks import with_sinks


@dataclass(frozen=True)
class Rectangle:
    """B entries padded to Q queries and K keys."""

    query_rows_BQ: torch.Tensor
    """int64: index of each query among all queries; padding repeats the entry's first."""
    key_rows_BK: torch.Tensor
    """int64: the same for keys."""
    valid_BQ: torch.Tensor
    """bool: rows that are queries and not padding."""
    last_keys_BQ: torch.Tensor
    """int64: the last key that each query sees, among the K of its row."""
    is_plain: bool
    """Whether it is plain causal attention, because every entry has as many keys as queries."""

    def mask(self, window: int | None) -> torch.Tensor:
        """Return which pairs attend, bool [B, 1, Q, K]."""
        last_keys_BQ1 = self.last_keys_BQ.unsqueeze(-1)
        key_K = torch.arange(self.key_rows_BK.shape[1], device=last_keys_BQ1.device)
        mask_BQK = key_K <= last_keys_BQ1
        if window is not None:
            mask_BQK &= key_K > last_keys_BQ1 - window
        return mask_BQK.unsqueeze(1)


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
    # Padding sees a key too, for a softmax over none is NaN.
    last_keys_BQ = ((keys_B - queries_B)[:, None] + query_Q).clamp(max=len(key_K) - 1)
    rectangle = Rectangle(
        query_rows.to(device),
        key_rows.to(device),
        valid_BQ.to(device),
        last_keys_BQ.to(device),
        is_plain=torch.equal(queries_B, keys_B),
    )
    return rectangle, query_rows[valid_BQ]


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    scale: float | None = None,
    *,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from query [T, heads, d] to key [K, kv_heads, d] and value [K, kv_heads, v], causally within each entry.

    The scores are multiplied by `scale`; None: 1 / sqrt(d). Each query sees its last `window` keys; None: all. `sinks`
    [heads] are scores of the heads' sinks; None: they have none.

    Returns:
        [T, heads, v].
    """
    if isinstance(plan, FlashPlan):
        return flash_attention(query, key, value, plan, scale, window, sinks)
    outputs = [_rectangle_attention(query, key, value, each, scale, window, sinks) for each in plan.rectangles]
    return torch.cat(outputs).index_select(0, plan.restore_T)


def _rectangle_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rectangle: Rectangle,
    scale: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the output of one rectangle's queries without padding, [queries, heads, v]."""
    heads_BHQD = query[rectangle.query_rows_BQ].transpose(1, 2)
    key_BHKD, value_BHKD = (each[rectangle.key_rows_BK].transpose(1, 2) for each in (key, value))
    n_keys = key_BHKD.shape[2]
    is_plain = rectangle.is_plain and (window is None or window >= n_keys)
    mask = None if is_plain and sinks is None else rectangle.mask(window)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if sinks is not None and mask is not None:
        sinks = sinks.unsqueeze(1)
        heads_BHQD, key_BHKD, value_BHKD, mask = with_sinks(heads_BHQD, key_BHKD, value_BHKD, mask, sinks, scale)
    output_BHQD = F.scaled_dot_product_attention(
        heads_BHQD,
        key_BHKD,
        value_BHKD,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output_BHQD.transpose(1, 2)[rectangle.valid_BQ]
