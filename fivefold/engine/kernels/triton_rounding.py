"""Triton kernels of stochastic rounding. Their bits are equal to `fivefold.engine.kernels.rounding`'s."""

# mypy: allow-untyped-decorators
from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


def add_rounded(total: torch.Tensor, values: torch.Tensor, seed: int, start: int) -> None:
    """Add values to a contiguous bfloat16 tensor of the same shape in place, in float32, rounded stochastically."""
    n = total.numel()
    if n:
        _add_rounded_kernel[(triton.cdiv(n, _BLOCK),)](total, values.contiguous(), n, seed, start, BLOCK=_BLOCK)


@triton.jit(do_not_specialize=["seed", "start"])
def _add_rounded_kernel(
    total: tl.tensor, values: tl.tensor, n: tl.tensor, seed: tl.tensor, start: tl.tensor, BLOCK: tl.constexpr
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    earlier = tl.load(total + place, mask=inside, other=0.0).to(tl.float32)
    sums = earlier + tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + place, rounded(sums, place + start, seed), mask=inside)


@triton.jit
def rounded(value: tl.tensor, position: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """Return float32 values, rounded stochastically to bfloat16. Those that are not finite stay so.

    Args:
        value: the values.
        position: of each value in the noise; its lowest 32 bits count.
        seed: int32, of the noise.
    """
    bits = position.to(tl.uint32) ^ seed.to(tl.uint32, bitcast=True)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    noise = (bits ^ (bits >> 16)) & 0xFFFF
    exact = value.to(tl.uint32, bitcast=True)
    is_finite = (exact & 0x7F800000) != 0x7F800000
    noisy = tl.where(is_finite, exact + noise, exact)
    return (noisy >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
