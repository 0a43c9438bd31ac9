"""Triton kernels around the grouped matrix products of the experts: one pass over memory each, no atomics.

Row indices are widened to 64 bits, because rows times width may exceed 2^31. Rows are read in column blocks of 16 bytes
per thread, which is what one load instruction moves.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

# Columns that a program of 4 warps takes at one time: 8 half-precision values a thread.
_BLOCK = 1024


def sum_rows(rows_ND: torch.Tensor, index_TK: torch.Tensor) -> torch.Tensor:
    """Sum rows[index[t, k]] over k in float32; -1 is no row. Returns [T, D]; it has no gradient."""
    rows, index = rows_ND.contiguous(), index_TK.contiguous()
    n_tokens, n_terms = index.shape
    width = rows.shape[1]
    sums = rows.new_empty(n_tokens, width)
    block = min(triton.next_power_of_2(width), _BLOCK)
    _sum_rows_kernel[(n_tokens, triton.cdiv(width, block))](rows, index, sums, width, TERMS=n_terms, BLOCK=block)
    return sums


@triton.jit
def _sum_rows_kernel(
    rows: tl.tensor, index: tl.tensor, sums: tl.tensor, width: tl.tensor, TERMS: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for term in tl.static_range(TERMS):
        row = tl.load(index + token * TERMS + term).to(tl.int64)
        total += tl.load(rows + row * width + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
    tl.store(sums + token * width + column, total.to(sums.dtype.element_ty), mask=inside)


def swiglu(gate_up_N2F: torch.Tensor, probs_N: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up * probability in float32, rounded once. Returns [N, F]."""
    return _SwiGLU.apply(gate_up_N2F.contiguous(), probs_N.contiguous())


def clamped_swiglu(gate_up_N2F: torch.Tensor, probs_N: torch.Tensor, limit: float, factor: float) -> torch.Tensor:
    """Compute (up + 1) * gate * sigmoid(factor * gate) * probability in float32, rounded once. Returns [N, F].

    Gate and up alternate; gates are at most `limit`, and ups are clamped to -limit .. limit.
    """
    return _ClampedSwiGLU.apply(gate_up_N2F.contiguous(), probs_N.contiguous(), limit, factor)


class _SwiGLU(torch.autograd.Function):
    """Keeps its inputs only: the backward pass computes the activation again."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up, probs)
        n_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        output = gate_up.new_empty(n_rows, width)
        block = min(triton.next_power_of_2(width), _BLOCK)
        _swiglu_kernel[(n_rows, triton.cdiv(width, block))](gate_up, probs, output, width, BLOCK=block)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up, probs = ctx.saved_tensors
        grad_gate_up, grad_probs = torch.empty_like(gate_up), torch.empty_like(probs)
        width = grad.shape[1]
        block = min(triton.next_power_of_2(width), _BLOCK)
        _swiglu_backward_kernel[(grad.shape[0],)](
            gate_up, probs, grad.contiguous(), grad_gate_up, grad_probs, width, BLOCK=block
        )
        return grad_gate_up, grad_probs


@triton.jit
def _swiglu_kernel(
    gate_up: tl.tensor, probs: tl.tensor, output: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    prob = tl.load(probs + row).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up * prob
    tl.store(output + row * width + column, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward_kernel(
    gate_up: tl.tensor,
    probs: tl.tensor,
    grad: tl.tensor,
    grad_gate_up: tl.tensor,
    grad_probs: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    # A program takes a whole row, because the gradient of the row's probability is a sum over it.
    row = tl.program_id(0).to(tl.int64)
    prob = tl.load(probs + row).to(tl.float32)
    grad_prob = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        gate_offset = row * 2 * width + column
        gate = tl.load(gate_up + gate_offset, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + gate_offset + width, mask=inside, other=0.0).to(tl.float32)
        grad_output = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        grad_prob += grad_output * silu * up
        grad_product = grad_output * prob
        grad_gate = grad_product * up * (sigmoid + silu * (1.0 - sigmoid))
        grad_up = grad_product * silu
        tl.store(grad_gate_up + gate_offset, grad_gate.to(grad_gate_up.dtype.element_ty), mask=inside)
        tl.store(grad_gate_up + gate_offset + width, grad_up.to(grad_gate_up.dtype.element_ty), mask=inside)
    tl.store(grad_probs + row, tl.sum(grad_prob, 0).to(grad_probs.dtype.element_ty))


class _ClampedSwiGLU(torch.autograd.Function):
    """Keeps its inputs only: the backward pass computes the activation again."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, probs: torch.Tensor, limit: float, factor: float) -> torch.Tensor:
        ctx.save_for_backward(gate_up, probs)
        ctx.limit, ctx.factor = limit, factor
        n_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        output = gate_up.new_empty(n_rows, width)
        block = min(triton.next_power_of_2(width), _BLOCK)
        grid = (n_rows, triton.cdiv(width, block))
        _clamped_kernel[grid](gate_up, probs, output, width, LIMIT=limit, FACTOR=factor, BLOCK=block)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        gate_up, probs = ctx.saved_tensors
        grad_gate_up, grad_probs = torch.empty_like(gate_up), torch.empty_like(probs)
        width = grad.shape[1]
        block = min(triton.next_power_of_2(width), _BLOCK)
        _clamped_backward_kernel[(grad.shape[0],)](
            gate_up, probs, grad.contiguous(), grad_gate_up, grad_probs, width,
            LIMIT=ctx.limit, FACTOR=ctx.factor, BLOCK=block,
        )  # fmt: skip
        return grad_gate_up, grad_probs, None, None


@triton.jit
def _clamped_kernel(
    gate_up: tl.tensor,
    probs: tl.tensor,
    output: tl.tensor,
    width: tl.tensor,
    LIMIT: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    offset = row * 2 * width + 2 * column
    gate = tl.minimum(tl.load(gate_up + offset, mask=inside, other=0.0).to(tl.float32), LIMIT)
    up = tl.load(gate_up + offset + 1, mask=inside, other=0.0).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    prob = tl.load(probs + row).to(tl.float32)
    result = (up + 1.0) * gate * tl.sigmoid(FACTOR * gate) * prob
    tl.store(output + row * width + column, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _clamped_backward_kernel(
    gate_up: tl.tensor,
    probs: tl.tensor,
    grad: tl.tensor,
    grad_gate_up: tl.tensor,
    grad_probs: tl.tensor,
    width: tl.tensor,
    LIMIT: tl.constexpr,
    FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # A program takes a whole row, because the gradient of the row's probability is a sum over it.
    row = tl.program_id(0).to(tl.int64)
    prob = tl.load(probs + row).to(tl.float32)
    grad_prob = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        offset = row * 2 * width + 2 * column
        raw_gate = tl.load(gate_up + offset, mask=inside, other=0.0).to(tl.float32)
        raw_up = tl.load(gate_up + offset + 1, mask=inside, other=0.0).to(tl.float32)
        grad_output = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        gate = tl.minimum(raw_gate, LIMIT)
        up = tl.minimum(tl.maximum(raw_up, -LIMIT), LIMIT)
        sigmoid = tl.sigmoid(FACTOR * gate)
        grad_prob += grad_output * (up + 1.0) * gate * sigmoid
        grad_product = grad_output * prob
        # Clamped values have no gradient; at the limits themselves it passes, as in PyTorch.
        grad_gate = grad_product * (up + 1.0) * sigmoid * (1.0 + FACTOR * gate * (1.0 - sigmoid))
        grad_gate = tl.where(raw_gate <= LIMIT, grad_gate, 0.0)
        grad_up = tl.where((raw_up >= -LIMIT) & (raw_up <= LIMIT), grad_product * gate * sigmoid, 0.0)
        tl.store(grad_gate_up + offset, grad_gate.to(grad_gate_up.dtype.element_ty), mask=inside)
        tl.store(grad_gate_up + offset + 1, grad_up.to(grad_gate_up.dtype.element_ty), mask=inside)
    tl.store(grad_probs + row, tl.sum(grad_prob, 0).to(grad_probs.dtype.element_ty))
