"""Triton kernels of rounding. Their bits are equal to `fivefold.engine.kernels.rounding`'s and `precision`'s."""

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


def round_to(value_N: torch.Tensor, out_N: torch.Tensor, seed: int, start: int, half: int) -> None:
    """Round float32 values stochastically to bfloat16, by the lower (0) or upper (1) half of the noise."""
    if n := value_N.numel():
        _round_kernel[(triton.cdiv(n, _BLOCK),)](value_N, out_N, n, seed, start, HALF=half, BLOCK=_BLOCK)


def join_master(weight_N: torch.Tensor, remainder_N: torch.Tensor) -> torch.Tensor:
    """Return the float32 master weights of bfloat16 weights and their int16 remainders."""
    n = weight_N.numel()
    bits = torch.empty(n, dtype=torch.int32, device=weight_N.device)
    if n:
        _join_kernel[(triton.cdiv(n, _BLOCK),)](weight_N.view(torch.int16), remainder_N, bits, n, BLOCK=_BLOCK)
    return bits.view(torch.float32)


def split_master(master_N: torch.Tensor, weight_N: torch.Tensor, remainder_N: torch.Tensor) -> None:
    """Write float32 master weights as bfloat16 weights, the nearest ones, and int16 remainders."""
    if n := master_N.numel():
        high_N = weight_N.view(torch.int16)
        _split_kernel[(triton.cdiv(n, _BLOCK),)](master_N.view(torch.int32), high_N, remainder_N, n, BLOCK=_BLOCK)


@triton.jit(do_not_specialize=["seed", "start"])
def _add_rounded_kernel(
    total: tl.tensor, values: tl.tensor, n: tl.tensor, seed: tl.tensor, start: tl.tensor, BLOCK: tl.constexpr
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    earlier = tl.load(total + place, mask=inside, other=0.0).to(tl.float32)
    sums = earlier + tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + place, rounded(sums, place + start, seed), mask=inside)


@triton.jit(do_not_specialize=["seed", "start"])
def _round_kernel(
    values: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    seed: tl.tensor,
    start: tl.tensor,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    exact = tl.load(values + place, mask=inside, other=0.0).to(tl.uint32, bitcast=True)
    noisy = exact + ((_hashed(place + start, seed) >> (16 * HALF)) & 0xFFFF)
    tl.store(out + place, (noisy >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=inside)


@triton.jit
def _join_kernel(high: tl.tensor, low: tl.tensor, out: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    upper = tl.load(high + place, mask=inside, other=0).to(tl.int32) << 16
    tl.store(out + place, upper + tl.load(low + place, mask=inside, other=0).to(tl.int32), mask=inside)


@triton.jit
def _split_kernel(values: tl.tensor, high: tl.tensor, low: tl.tensor, n: tl.tensor, BLOCK: tl.constexpr) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    bits = tl.load(values + place, mask=inside, other=0)
    upper = (bits + 0x8000) >> 16
    tl.store(high + place, upper.to(tl.int16), mask=inside)
    tl.store(low + place, (bits - (upper << 16)).to(tl.int16), mask=inside)


@triton.jit
def rounded(value: tl.tensor, position: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """Return float32 values, rounded stochastically to bfloat16. Those that are not finite stay so.

    Args:
        value: the values.
        position: of each value in the noise; its lowest 32 bits count.
        seed: int32, of the noise.
    """
    exact = value.to(tl.uint32, bitcast=True)
    is_finite = (exact & 0x7F800000) != 0x7F800000
    noisy = tl.where(is_finite, exact + (_hashed(position, seed) & 0xFFFF), exact)
    return (noisy >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _hashed(position: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """Return the 32 bits of noise at each position."""
    bits = position.to(tl.uint32) ^ seed.to(tl.uint32, bitcast=True)
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)
