"""Master weights in 16 bits are exact, and moments in bfloat16 are right on average."""

from __future__ import annotations

import torch

from fivefold.engine.state.precision import join_master, noise, round_stochastically, split_master

CPU = torch.device("cpu")


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


def test_stochastic_rounding_picks_neighbours_by_their_distance() -> None:
    n = 2**16
    for number in (1 + 2**-7 * 0.25, -3.0 * (1 + 2**-7 * 0.25), 1e-3, 1.0, 0.0):
        values, rounded = torch.full((n,), number), torch.empty(n, dtype=torch.bfloat16)
        round_stochastically(values, noise("w/1", 0, n, CPU)[0], rounded)
        lower = torch.tensor(number).view(torch.int32).bitwise_and(-(2**16)).view(torch.float32)
        unit = float((torch.nextafter(lower.bfloat16().abs(), torch.tensor(torch.inf).bfloat16()) - lower.abs()).abs())
        assert float((rounded.double() - number).abs().max()) <= unit
        assert abs(float(rounded.double().mean()) - float(values[0])) <= 0.01 * unit


def test_noise_is_even_and_depends_on_key_and_position_alone() -> None:
    first, second = noise("w/1", 0, 2**16, CPU)
    for bits in (first, second):
        assert int(bits.min()) >= 0
        assert int(bits.max()) < 2**16
        counts = torch.bincount(bits // 2**12, minlength=16).double()
        assert float((counts / 2**12 - 1).abs().max()) < 0.1
    assert abs(float(torch.corrcoef(torch.stack((first, second)).double())[0, 1])) < 0.02
    later = noise("w/1", 1000, 50, CPU)
    assert torch.equal(later[0], first[1000:1050])
    assert not torch.equal(noise("w/2", 0, 2**16, CPU)[0], first)
    assert not torch.equal(noise("v/1", 0, 2**16, CPU)[0], first)
    far = noise("w/1", 2**32 - 10, 20, CPU)[0]
    assert torch.equal(far[10:], first[:10])


def test_a_moment_in_bfloat16_follows_small_changes() -> None:
    """The moment decays by 0.1 % a step, which is less than half a unit in the last place."""
    moment = torch.ones(4096, dtype=torch.bfloat16)
    for step in range(1000):
        round_stochastically(moment.float() * 0.999, noise(f"w/{step}", 0, 4096, CPU)[1], moment)
    assert abs(float(moment.float().mean()) / 0.999**1000 - 1) < 0.02
    assert (torch.ones((), dtype=torch.bfloat16) * 0.999).bfloat16() == 1
