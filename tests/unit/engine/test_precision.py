"""Master weights in 16 bits are exact."""

from __future__ import annotations

import torch

from fivefold.engine.state.precision import join_master, split_master


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.empty_like(master, dtype=torch.bfloat16)
    remainder = torch.empty_like(master, dtype=torch.int16)
    split_master(master, weight, remainder)
    return weight, remainder


def test_weight_and_remainder_are_the_master_weight_bit_for_bit() -> None:
    random = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 100_000)
    ties = (torch.arange(-(2**15), 2**15, dtype=torch.int32) * 2**16 + 2**15).view(torch.float32)
    masters = torch.cat((random, ties[ties.isfinite()], torch.tensor([0.0, -0.0, 1e-45, 3.4e38, torch.inf])))
    weight, remainder = split(masters)
    assert torch.equal(join_master(weight, remainder).view(torch.int32), masters.view(torch.int32))


def test_the_weight_is_the_nearest_and_ties_go_away_from_zero() -> None:
    masters = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    is_tie = masters.view(torch.int32) & 0xFFFF == 0x8000
    weight, _ = split(masters)
    assert torch.equal(weight[~is_tie], masters.bfloat16()[~is_tie])
    tie = torch.tensor([1 + 2**-8, -1 - 2**-8])
    assert split(tie)[0].tolist() == [1 + 2**-7, -1 - 2**-7]
