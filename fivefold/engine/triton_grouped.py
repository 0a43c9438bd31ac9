"""Triton kernel that adds the gradients of the experts' weights to their accumulated sum.

A program makes one tile of one expert's gradient: it sums over the expert's rows in registers, in float32, and adds the
tile to memory once. Beside the factors, that is one read and one write of the sum, no atomics, and nothing at all for
an expert without rows.
"""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 128
"""Rows and columns of a tile. Two programs of 4 warps fit on a multiprocessor: one adds while the other multiplies."""
_DEPTH = 64
"""Rows of the factors that are multiplied at one time."""
_STAGES = 3
"""Blocks of the factors in shared memory, 96 KiB together: one is multiplied while the others arrive."""


def add_grouped_product(
    total_EOI: torch.Tensor, grad_NO: torch.Tensor, rows_NI: torch.Tensor, ends_E: torch.Tensor
) -> None:
    """Add grad[rows of e].T @ rows[rows of e] to the contiguous total[e] in place, for every group e."""
    grad, rows = grad_NO.contiguous(), rows_NI.contiguous()
    n_groups, n_out, n_in = total_EOI.shape
    n_tiles = triton.cdiv(n_out, _TILE) * triton.cdiv(n_in, _TILE)
    # Tiles of one expert run together, so that its rows are read from memory once and from the L2 cache after that.
    _add_grouped_product_kernel[(n_tiles, n_groups)](
        total_EOI, grad, rows, ends_E, n_out, n_in, TILE=_TILE, DEPTH=_DEPTH, num_warps=4, num_stages=_STAGES
    )


@triton.jit
def _add_grouped_product_kernel(
    total: tl.tensor,
    grad: tl.tensor,
    rows: tl.tensor,
    ends: tl.tensor,
    n_out: tl.tensor,
    n_in: tl.tensor,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    group = tl.program_id(1)
    start = tl.load(ends + group - 1, mask=group > 0, other=0)
    stop = tl.load(ends + group)
    if stop > start:
        tiles_in = tl.cdiv(n_in, TILE)
        out_column = (tl.program_id(0) // tiles_in) * TILE + tl.arange(0, TILE)
        in_column = (tl.program_id(0) % tiles_in) * TILE + tl.arange(0, TILE)
        product = tl.zeros([TILE, TILE], tl.float32)
        for first in range(start, stop, DEPTH):
            row = first + tl.arange(0, DEPTH)
            wide_row = row.to(tl.int64)[:, None]
            grad_block = tl.load(
                grad + wide_row * n_out + out_column[None, :],
                mask=(row < stop)[:, None] & (out_column < n_out)[None, :],
                other=0.0,
            )
            rows_block = tl.load(
                rows + wide_row * n_in + in_column[None, :],
                mask=(row < stop)[:, None] & (in_column < n_in)[None, :],
                other=0.0,
            )
            product = tl.dot(tl.trans(grad_block), rows_block, product)
        matrix = total + group.to(tl.int64) * n_out * n_in
        place = matrix + out_column.to(tl.int64)[:, None] * n_in + in_column[None, :]
        inside = (out_column < n_out)[:, None] & (in_column < n_in)[None, :]
        earlier = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, (earlier + product).to(total.dtype.element_ty), mask=inside)
