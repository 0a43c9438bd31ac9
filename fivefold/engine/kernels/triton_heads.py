"""Triton kernels from the joint projection to queries, keys and values: split, q/k norm and rotation in one pass.

A program holds one group of one token, its query heads, key and value, as two tiles [heads, D / 2]. The rotation pairs
channel i with channel i + D/2, so both channels of a pair are in the same thread.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# Groups that one program of the backward pass takes in turn: more groups mean fewer partial sums, but fewer programs.
_GROUPS_PER_PROGRAM = 8


def split_heads(
    qkv_TC: torch.Tensor,
    query_weight_D: torch.Tensor | None,
    key_weight_D: torch.Tensor | None,
    cos_T1D: torch.Tensor,
    sin_T1D: torch.Tensor,
    n_groups: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split into queries [T, heads, D], keys and values [T, groups, D], computed in float32 and rounded once.

    Raises:
        ValueError: D is odd.
    """
    return _SplitHeads.apply(
        qkv_TC.contiguous(), query_weight_D, key_weight_D, cos_T1D.contiguous(), sin_T1D.contiguous(), n_groups, eps
    )


class _SplitHeads(torch.autograd.Function):
    """Keeps the joint projection for the backward pass only if there is a norm, because the rotation is linear."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        query_weight: torch.Tensor | None,
        key_weight: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        n_groups: int,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        has_norm = query_weight is not None
        ctx.save_for_backward(qkv if has_norm else None, query_weight, key_weight, cos, sin)
        n_tokens, head_dim = qkv.shape[0], cos.shape[-1]
        n_queries = qkv.shape[1] // (n_groups * head_dim) - 2
        ctx.constants = (n_queries, n_groups, eps)
        query = qkv.new_empty(n_tokens, n_groups * n_queries, head_dim)
        key, value = (qkv.new_empty(n_tokens, n_groups, head_dim) for _ in range(2))
        _split_kernel[(n_tokens * n_groups,)](
            qkv, query_weight, key_weight, cos, sin, query, key, value, n_groups, eps,
            HAS_NORM=has_norm, **_tile(n_queries, head_dim),
        )  # fmt: skip
        return query, key, value

    @staticmethod
    def backward(
        ctx: Any, grad_query: torch.Tensor, grad_key: torch.Tensor, grad_value: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        qkv, query_weight, key_weight, cos, sin = ctx.saved_tensors
        n_queries, n_groups, eps = ctx.constants
        n_tokens, _, head_dim = grad_query.shape
        rows = n_tokens * n_groups
        n_programs = triton.cdiv(rows, _GROUPS_PER_PROGRAM)
        grad_qkv = grad_query.new_empty(n_tokens, n_groups * (n_queries + 2) * head_dim)
        has_norm = query_weight is not None
        partial = grad_query.new_empty(n_programs, 2, head_dim, dtype=torch.float32) if has_norm else None
        _split_backward_kernel[(n_programs,)](
            qkv, query_weight, key_weight, cos, sin,
            grad_query.contiguous(), grad_key.contiguous(), grad_value.contiguous(), grad_qkv, partial,
            n_groups, eps, rows, GROUPS=_GROUPS_PER_PROGRAM, HAS_NORM=has_norm, **_tile(n_queries, head_dim),
        )  # fmt: skip
        if partial is None:
            return grad_qkv, None, None, None, None, None, None
        grad_query_weight, grad_key_weight = partial.sum(0).to(query_weight.dtype)
        return grad_qkv, grad_query_weight, grad_key_weight, None, None, None, None


def _tile(n_queries: int, head_dim: int) -> dict[str, int]:
    """Return constants of both kernels. Sides of tiles are powers of two; a thread has 16 values, up to 8 warps."""
    if head_dim % 2 != 0:
        raise ValueError(f"head_dim {head_dim} must be even: channels are rotated in pairs")
    heads, half = triton.next_power_of_2(n_queries + 2), triton.next_power_of_2(head_dim // 2)
    num_warps = min(max(2 * heads * half // (32 * 16), 1), 8)
    return {
        "QUERIES": n_queries,
        "HALF": head_dim // 2,
        "HEADS_BLOCK": heads,
        "HALF_BLOCK": half,
        "num_warps": num_warps,
    }


@triton.jit
def _load(pointer: tl.tensor, offset: tl.tensor, mask: tl.tensor, HALF: tl.constexpr) -> tl.tuple:
    """Load both halves of the channels, as float32."""
    first = tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(pointer + offset + HALF, mask=mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _store(
    pointer: tl.tensor, offset: tl.tensor, first: tl.tensor, second: tl.tensor, mask: tl.tensor, HALF: tl.constexpr
) -> None:
    tl.store(pointer + offset, first.to(pointer.dtype.element_ty), mask=mask)
    tl.store(pointer + offset + HALF, second.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _load_weights(
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    head: tl.tensor,
    channel: tl.tensor,
    QUERIES: tl.constexpr,
    HALF: tl.constexpr,
) -> tl.tuple:
    """Load the norm's weight of every head of a tile."""
    query_first, query_second = _load(query_weight, channel, channel < HALF, HALF)
    key_first, key_second = _load(key_weight, channel, channel < HALF, HALF)
    return tl.where(head == QUERIES, key_first, query_first), tl.where(head == QUERIES, key_second, query_second)


@triton.jit
def _inverse_rms(first: tl.tensor, second: tl.tensor, eps: tl.tensor, HALF: tl.constexpr) -> tl.tensor:
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    return tl.rsqrt(squares / (2 * HALF) + eps)[:, None]


@triton.jit
def _split_kernel(
    qkv: tl.tensor,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    n_groups: tl.tensor,
    eps: tl.tensor,
    HAS_NORM: tl.constexpr,
    QUERIES: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    channel = tl.arange(0, HALF_BLOCK)[None, :]
    inside = channel < HALF
    of_token = row // n_groups * (2 * HALF) + channel
    cos_first, cos_second = _load(cos, of_token, inside, HALF)
    sin_first, sin_second = _load(sin, of_token, inside, HALF)
    x_first, x_second = _load(
        qkv, (row * (QUERIES + 2) + head) * (2 * HALF) + channel, inside & (head < QUERIES + 2), HALF
    )
    # The value is neither normalised nor rotated.
    value_offset = (row + head - (QUERIES + 1)) * (2 * HALF) + channel
    _store(value, value_offset, x_first, x_second, inside & (head == QUERIES + 1), HALF)
    if HAS_NORM:
        scale = _inverse_rms(x_first, x_second, eps, HALF)
        weight_first, weight_second = _load_weights(query_weight, key_weight, head, channel, QUERIES, HALF)
        x_first = x_first * scale * weight_first
        x_second = x_second * scale * weight_second
    rotated_first = x_first * cos_first - x_second * sin_first
    rotated_second = x_second * cos_second + x_first * sin_second
    query_offset = (row * QUERIES + head) * (2 * HALF) + channel
    _store(query, query_offset, rotated_first, rotated_second, inside & (head < QUERIES), HALF)
    key_offset = (row + head - QUERIES) * (2 * HALF) + channel
    _store(key, key_offset, rotated_first, rotated_second, inside & (head == QUERIES), HALF)


@triton.jit
def _load_grad(
    grad_query: tl.tensor,
    grad_key: tl.tensor,
    grad_value: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    channel: tl.tensor,
    QUERIES: tl.constexpr,
    HALF: tl.constexpr,
) -> tl.tuple:
    """Load a group's three gradients as one tile, in the order of the joint projection."""
    inside = channel < HALF
    query_offset = (row * QUERIES + head) * (2 * HALF) + channel
    key_offset = (row + head - QUERIES) * (2 * HALF) + channel
    value_offset = (row + head - (QUERIES + 1)) * (2 * HALF) + channel
    query_first, query_second = _load(grad_query, query_offset, inside & (head < QUERIES), HALF)
    key_first, key_second = _load(grad_key, key_offset, inside & (head == QUERIES), HALF)
    value_first, value_second = _load(grad_value, value_offset, inside & (head == QUERIES + 1), HALF)
    return query_first + key_first + value_first, query_second + key_second + value_second


@triton.jit(do_not_specialize=["n_rows"])
def _split_backward_kernel(
    qkv: tl.tensor,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    grad_query: tl.tensor,
    grad_key: tl.tensor,
    grad_value: tl.tensor,
    grad_qkv: tl.tensor,
    partial: tl.tensor,
    n_groups: tl.tensor,
    eps: tl.tensor,
    n_rows: tl.tensor,
    GROUPS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    QUERIES: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
) -> None:
    first_row = tl.program_id(0).to(tl.int64) * GROUPS
    head = tl.arange(0, HEADS_BLOCK)[:, None]
    channel = tl.arange(0, HALF_BLOCK)[None, :]
    inside = channel < HALF
    weight_sum_first = tl.zeros([HEADS_BLOCK, HALF_BLOCK], tl.float32)
    weight_sum_second = tl.zeros([HEADS_BLOCK, HALF_BLOCK], tl.float32)
    for row in range(first_row, tl.minimum(first_row + GROUPS, n_rows)):
        of_token = row // n_groups * (2 * HALF) + channel
        cos_first, cos_second = _load(cos, of_token, inside, HALF)
        sin_first, sin_second = _load(sin, of_token, inside, HALF)
        raw_first, raw_second = _load_grad(grad_query, grad_key, grad_value, row, head, channel, QUERIES, HALF)
        grad_first = raw_first * cos_first + raw_second * sin_second
        grad_second = raw_second * cos_second - raw_first * sin_first
        offset = (row * (QUERIES + 2) + head) * (2 * HALF) + channel
        mask = inside & (head < QUERIES + 2)
        if HAS_NORM:
            x_first, x_second = _load(qkv, offset, mask, HALF)
            scale = _inverse_rms(x_first, x_second, eps, HALF)
            unit_first = x_first * scale
            unit_second = x_second * scale
            weight_sum_first += grad_first * unit_first
            weight_sum_second += grad_second * unit_second
            weight_first, weight_second = _load_weights(query_weight, key_weight, head, channel, QUERIES, HALF)
            grad_first *= weight_first
            grad_second *= weight_second
            along = (tl.sum(grad_first * unit_first, 1) + tl.sum(grad_second * unit_second, 1))[:, None] / (2 * HALF)
            grad_first = (grad_first - unit_first * along) * scale
            grad_second = (grad_second - unit_second * along) * scale
        grad_first = tl.where(head == QUERIES + 1, raw_first, grad_first)
        grad_second = tl.where(head == QUERIES + 1, raw_second, grad_second)
        _store(grad_qkv, offset, grad_first, grad_second, mask, HALF)
    if HAS_NORM:
        _store_weight_sums(partial, weight_sum_first, weight_sum_second, head < QUERIES, 0, HALF, HALF_BLOCK)
        _store_weight_sums(partial, weight_sum_first, weight_sum_second, head == QUERIES, 1, HALF, HALF_BLOCK)


@triton.jit
def _store_weight_sums(
    partial: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    chosen: tl.tensor,
    slot: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
) -> None:
    """This program's share of one norm's weight gradient, partial[program, slot]: the sum over the `chosen` heads."""
    channel = tl.arange(0, HALF_BLOCK)
    offset = (tl.program_id(0) * 2 + slot) * (2 * HALF) + channel
    first_sum, second_sum = tl.sum(tl.where(chosen, first, 0.0), 0), tl.sum(tl.where(chosen, second, 0.0), 0)
    _store(partial, offset, first_sum, second_sum, channel < HALF, HALF)
