"""Optimizer state in fewer bits: float32 master weights as bfloat16 weights and remainders, moments in bfloat16.

The remainder is exact: weight and remainder together are the master weight bit for bit. Moments in bfloat16 are
rounded stochastically, so that what many steps add up is right on average. To the nearest, the second moment would
not change: with beta2 = 0.999 a step changes it by 0.1 % of its distance from the squared gradient, and half a unit in
the last place of bfloat16 is 0.2 to 0.4 %.
"""

from __future__ import annotations

import zlib

import torch


def join_master(weight_N: torch.Tensor, remainder_N: torch.Tensor) -> torch.Tensor:
    """Return the float32 master weights [N] of bfloat16 weights and their int16 remainders."""
    high = weight_N.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return high.add_(remainder_N).view(torch.float32)


def split_master(master_N: torch.Tensor, weight_N: torch.Tensor, remainder_N: torch.Tensor) -> None:
    """Write float32 master weights as bfloat16 weights and int16 remainders, in place.

    The weights are rounded to the nearest, and ties away from zero: rounding ties to even, as PyTorch does, would leave
    some weights 2^16 + 1 possible remainders.
    """
    bits = master_N.view(torch.int32)
    high = (bits + 0x8000).bitwise_right_shift_(16)
    weight_N.view(torch.int16).copy_(high)
    remainder_N.copy_(bits - high.bitwise_left_shift_(16))


def round_stochastically(value_N: torch.Tensor, noise_N: torch.Tensor, out_N: torch.Tensor) -> None:
    """Round finite float32 values to bfloat16 neighbours, the nearer one more often, so that the mean is right.

    Args:
        value_N: float32 values.
        noise_N: int32 in 0 .. 2^16 - 1, evenly distributed.
        out_N: where to write them, bfloat16.
    """
    bits = value_N.view(torch.int32) + noise_N
    out_N.view(torch.int16).copy_(bits.bitwise_right_shift_(16))


def noise(key: str, start: int, count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two int32 tensors [count] of noise in 0 .. 2^16 - 1.

    They are functions of `key` and of the positions `start` .. `start + count - 1` alone. So copies of a parameter on
    several ranks are rounded alike, however they are divided, and a resumed run rounds as the run would have done.
    """
    bits = torch.arange(count, dtype=torch.int32, device=device).add_(_signed(start))
    bits.bitwise_xor_(_signed(zlib.crc32(key.encode())))
    # "lowbias32", an integer hash (https://nullprogram.com/blog/2018/07/31/). Products wrap, as they should.
    for multiplier, shift in ((0x7FEB352D, 16), (0x846CA68B, 15), (None, 16)):
        bits.bitwise_xor_((bits >> shift).bitwise_and_(2 ** (32 - shift) - 1))
        if multiplier is not None:
            bits.mul_(_signed(multiplier))
    return bits & 0xFFFF, (bits >> 16).bitwise_and_(0xFFFF)


def _signed(number: int) -> int:
    """Return the number whose 32 bits in two's complement are the lowest 32 bits of `number`."""
    return (number + 2**31) % 2**32 - 2**31
