"""Matrix products of experts, and products added to a weight's gradient, whose sum is in DDP's buffer (`main_grad`).

Rows ends[e-1] .. ends[e] belong to expert e. PyTorch multiplies; our own kernel adds the gradients of expert weights to
their sum, because PyTorch's kernel rounds each product to the dtype of its inputs.

Products are summed in float32. Where the buffer is in bfloat16 and has a `rounding`, each addition to it is rounded
stochastically.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fivefold.engine.kernels.elementwise import HAS_TRITON
from fivefold.engine.kernels.rounding import GradientRounding, add_rounded

if HAS_TRITON:
    from fivefold.engine.kernels import triton_grouped

_ALIGNMENT = 16
"""Bytes. PyTorch's grouped matmul requires rows that start at multiples of it, on every device."""
_ALIGNED_RANK = 8
"""Elements of bfloat16 in so many bytes."""
_ROWS_ROUNDED = 8192
"""Rows of a dense product that are in float32 at one time before they are rounded: 64 MiB of Qwen3-30B-A3B's head."""


def grouped_mm(a: torch.Tensor, b: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Multiply groups of rows of `a` by b [E, K, M], or groups of columns of `a` by groups of rows of `b` (matrices).

    Dtypes and widths that PyTorch's kernels refuse are multiplied group by group, which waits for the device.
    """
    is_taken = a.dtype == torch.bfloat16 or not a.is_cuda
    if is_taken and _is_aligned(a) and _is_aligned(b) and b.shape[-1] * b.element_size() % _ALIGNMENT == 0:
        return F.grouped_mm(a, b, offs=ends_E)
    stops = ends_E.tolist()
    starts = [0, *stops[:-1]]
    if b.dim() == 3:
        return torch.cat([a[start:stop] @ b[e] for e, (start, stop) in enumerate(zip(starts, stops, strict=True))])
    return torch.stack([a[:, start:stop] @ b[start:stop] for start, stop in zip(starts, stops, strict=True)])


def _is_aligned(matrices: torch.Tensor) -> bool:
    """Return whether all rows (columns, where those are contiguous) start at multiples of 16 bytes."""
    return max(matrices.stride()[-2:]) * matrices.element_size() % _ALIGNMENT == 0


def padded_rank(matrix: torch.Tensor, dim: int) -> torch.Tensor:
    """Return a matrix of the experts' adapters with zeros up to a rank that `grouped_mm` takes.

    Args:
        matrix: A [E, rank, in] or B [E, out, rank]; without E, if the experts share it.
        dim: the dimension of the rank, -2 or -1.
    """
    missing = -matrix.shape[dim] % _ALIGNED_RANK
    return F.pad(matrix, (0, missing) if dim == -1 else (0, 0, 0, missing)) if missing else matrix


def add_grouped_product(
    total_EOI: torch.Tensor, grad_NO: torch.Tensor, rows_NI: torch.Tensor, ends_E: torch.Tensor
) -> None:
    """Add grad[rows of e].T @ rows[rows of e] to total[e] in place, for every group e.

    The product is summed in float32, whatever the dtype of its factors, and rounded once, to the dtype of `total`.

    Raises:
        ValueError: `total` is not contiguous, or its shape is not [groups, columns of grad, columns of rows].
    """
    shape = (ends_E.numel(), grad_NO.shape[1], rows_NI.shape[1])
    if tuple(total_EOI.shape) != shape or not total_EOI.is_contiguous():
        raise ValueError(
            f"the product of these factors is added to a contiguous tensor of shape {shape}, "
            f"got shape {tuple(total_EOI.shape)} with strides {total_EOI.stride()}"
        )
    rounding = rounding_of(total_EOI)
    seed = None if rounding is None else rounding.next_seed()
    if HAS_TRITON and total_EOI.is_cuda and grad_NO.dtype == torch.bfloat16:
        triton_grouped.add_grouped_product(total_EOI, grad_NO, rows_NI, ends_E, seed)
        return
    product_EOI = grouped_mm(grad_NO.float().t(), rows_NI.float(), ends_E)
    if seed is None:
        total_EOI.add_(product_EOI)
    else:
        add_rounded(total_EOI, product_EOI, seed)


def add_matmul(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a @ b to the first rows of the matrix `total` in place.

    The product is summed in float32 and rounded once, to the dtype of `total`.
    """
    rounding, rows = rounding_of(total), total[: len(a)]
    if rounding is not None:
        seed = rounding.next_seed()
        for first in range(0, len(a), _ROWS_ROUNDED):
            part = rows[first : first + _ROWS_ROUNDED]
            add_rounded(part, _float32_product(a[first : first + _ROWS_ROUNDED], b), seed, start=first * total.shape[1])
    elif a.is_cuda and total.dtype == torch.float32 and a.dtype != torch.float32:
        torch.addmm(rows, a, b, out_dtype=torch.float32, out=rows)
    else:
        rows.addmm_(a.to(total.dtype), b.to(total.dtype))


def _float32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b in float32, without rounding a product of bfloat16 factors."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda and a.dtype != torch.float32 else a.float() @ b.float()


def main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """Return DDP's gradient buffer of this parameter, in the dtype of the sums; None without DDP."""
    buffer: torch.Tensor | None = vars(weight).get("main_grad")
    return buffer


def rounding_of(total: torch.Tensor) -> GradientRounding | None:
    """Return what rounds additions to a gradient's sum; None: each is rounded to the nearest."""
    rounding: GradientRounding | None = vars(total).get("rounding")
    return rounding


def mark_accumulated(weight: torch.Tensor) -> torch.Tensor | None:
    """Tell DDP that this micro-batch's gradient is in `main_grad` already. Returns what the backward pass must return.

    DDP's hook fires only on a gradient, so it gets one of undefined content, which it discards. A weight that is also
    the embedding (`zero_out_wgrad`) gets a real gradient from the embedding, which the hook must add: return None then.
    """
    if vars(weight).get("zero_out_wgrad", False):
        return None
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight)
