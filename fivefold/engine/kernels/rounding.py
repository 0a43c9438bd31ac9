"""Stochastic rounding to bfloat16: of the two neighbours, the nearer one more often, so that the mean is right.

What many small additions sum up to is then right on average. Rounded to the nearest, an addition of less than half a
unit in the last place, 0.2 to 0.4 % of the sum, is lost each time.
"""

from __future__ import annotations

import zlib

import torch

from fivefold.engine.kernels.elementwise import HAS_TRITON

if HAS_TRITON:
    from fivefold.engine.kernels import triton_rounding


def round_stochastically(value_N: torch.Tensor, noise_N: torch.Tensor, out_N: torch.Tensor) -> None:
    """Round finite float32 values to bfloat16 neighbours, the nearer one more often, so that the mean is right.

    Args:
        value_N: float32 values.
        noise_N: int32 in 0 .. 2^16 - 1, evenly distributed.
        out_N: where to write them, bfloat16.
    """
    bits = value_N.view(torch.int32) + noise_N
    out_N.view(torch.int16).copy_(bits.bitwise_right_shift_(16))


def round_to(value_N: torch.Tensor, out_N: torch.Tensor, seed: int, start: int, half: int) -> None:
    """Round finite float32 values to bfloat16 by the noise of their positions.

    Args:
        value_N: float32 values.
        out_N: where to write them, bfloat16.
        seed: see `noise`.
        start: position of the first value.
        half: which of the two tensors of noise to take, 0 or 1.
    """
    if HAS_TRITON and value_N.is_cuda:
        triton_rounding.round_to(value_N, out_N, seed, start, half)
    else:
        round_stochastically(value_N, noise(seed, start, value_N.numel(), value_N.device)[half], out_N)


def noise(seed: int, start: int, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two int32 tensors [count] of noise in 0 .. 2^16 - 1.

    They are functions of `seed` and of the positions `start` .. `start + count - 1` alone. So copies of a parameter on
    several ranks are rounded alike, however they are divided, and a resumed run rounds as the run would have done.
    """
    bits = torch.arange(count, dtype=torch.int32, device=device).add_(_signed(start))
    bits.bitwise_xor_(seed)
    # "lowbias32", an integer hash (https://nullprogram.com/blog/2018/07/31/). Products wrap, as they should.
    for multiplier, shift in ((0x7FEB352D, 16), (0x846CA68B, 15), (None, 16)):
        bits.bitwise_xor_((bits >> shift).bitwise_and_(2 ** (32 - shift) - 1))
        if multiplier is not None:
            bits.mul_(_signed(multiplier))
    return bits & 0xFFFF, (bits >> 16).bitwise_and_(0xFFFF)


def seed_of(key: str) -> int:
    """Return the seed, an int32, of the noise that belongs to a name."""
    return _signed(zlib.crc32(key.encode()))


def _signed(number: int) -> int:
    """Return the number whose 32 bits in two's complement are the lowest 32 bits of `number`."""
    return (number + 2**31) % 2**32 - 2**31


@torch.no_grad()
def add_rounded(total: torch.Tensor, values: torch.Tensor, seed: int, start: int = 0) -> None:
    """Add values to a contiguous bfloat16 tensor of the same shape in place, in float32, rounded stochastically.

    Sums that are not finite stay so.

    Args:
        total: the sum so far.
        values: what is added, float32 or bfloat16.
        seed: see `noise`.
        start: position of the first element in the noise.
    """
    if HAS_TRITON and total.is_cuda:
        triton_rounding.add_rounded(total, values, seed, start)
        return
    sum_N = total.float().add_(values).view(-1)
    noise_N, _ = noise(seed, start, sum_N.numel(), total.device)
    round_stochastically(sum_N, noise_N.mul_(sum_N.isfinite()), total.view(-1))


class GradientRounding:
    """The seeds by which a parameter's gradient, a sum in bfloat16, is rounded, one for each addition."""

    def __init__(self, key: str) -> None:
        """Begin with the first addition of step 0.

        Args:
            key: the parameter's name, and the data-parallel rank: copies of a parameter on the ranks of one replica
                are rounded alike, copies on different replicas independently, before they are averaged.
        """
        self._key, self._step, self._additions = key, 0, 0

    def start(self, step: int) -> None:
        """Begin with the first addition of an optimizer step."""
        self._step, self._additions = step, 0

    def next_seed(self) -> int:
        """Return the seed of the next addition."""
        self._additions += 1
        return seed_of(f"{self._key}/{self._step}/{self._additions}")
