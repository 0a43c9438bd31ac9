"""Grouped matrix products: the rows of each expert times that expert's weight, and the gradients of the weights.

Rows ends[e-1] .. ends[e] belong to expert e. PyTorch's kernel multiplies; the gradients of the weights are added to
their accumulated sum by a kernel of our own, because PyTorch's rounds each product to the dtype of its inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fivefold.engine.kernels.elementwise import HAS_TRITON

if HAS_TRITON:
    from fivefold.engine.kernels import triton_grouped

_ALIGNMENT = 16
"""Bytes. On every device, PyTorch's grouped matmul requires rows that start at multiples of it."""


def grouped_mm(a: torch.Tensor, b: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Grouped product over rows of `a` (b [E, K, M]), or over columns of `a` and rows of `b` (both matrices).

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
    if HAS_TRITON and total_EOI.is_cuda and grad_NO.dtype == torch.bfloat16:
        triton_grouped.add_grouped_product(total_EOI, grad_NO, rows_NI, ends_E)
    else:
        total_EOI.add_(grouped_mm(grad_NO.float().t(), rows_NI.float(), ends_E))


def _is_aligned(matrices: torch.Tensor) -> bool:
    """Whether all rows (columns, where those are contiguous) start at multiples of 16 bytes."""
    return max(matrices.stride()[-2:]) * matrices.element_size() % _ALIGNMENT == 0
