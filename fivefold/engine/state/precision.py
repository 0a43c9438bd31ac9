"""Optimizer state in fewer bits: float32 master weights as bfloat16 weights and remainders, moments in bfloat16.

The remainder is exact: weight and remainder together are the master weight bit for bit. Moments in bfloat16 are
rounded stochastically. To the nearest, the second moment would not change: with beta2 = 0.999 a step changes it by
0.1 % of its distance from the squared gradient, and half a unit in the last place of bfloat16 is 0.2 to 0.4 %.
"""

from __future__ import annotations

import torch

from fivefold.engine.kernels.elementwise import HAS_TRITON

if HAS_TRITON:
    from fivefold.engine.kernels import triton_rounding


def join_master(weight_N: torch.Tensor, remainder_N: torch.Tensor) -> torch.Tensor:
    """Return the float32 master weights [N] of bfloat16 weights and their int16 remainders."""
    if HAS_TRITON and weight_N.is_cuda:
        return triton_rounding.join_master(weight_N, remainder_N)
    high = weight_N.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return high.add_(remainder_N).view(torch.float32)


def split_master(master_N: torch.Tensor, weight_N: torch.Tensor, remainder_N: torch.Tensor) -> None:
    """Write float32 master weights as bfloat16 weights and int16 remainders, in place.

    The weights are rounded to the nearest, and ties away from zero: rounding ties to even, as PyTorch does, would leave
    some weights 2^16 + 1 possible remainders.
    """
    if HAS_TRITON and weight_N.is_cuda:
        triton_rounding.split_master(master_N, weight_N, remainder_N)
        return
    bits = master_N.view(torch.int32)
    high = (bits + 0x8000).bitwise_right_shift_(16)
    weight_N.view(torch.int16).copy_(high)
    remainder_N.copy_(bits - high.bitwise_left_shift_(16))
