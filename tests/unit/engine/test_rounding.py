"""Sums in bfloat16 that are rounded stochastically are right on average."""

from __future__ import annotations

import pytest
import torch

from fivefold.engine.kernels.matmul import add_grouped_product, add_matmul
from fivefold.engine.kernels.rounding import GradientRounding, add_rounded, noise, round_stochastically, seed_of

CPU = torch.device("cpu")


def test_stochastic_rounding_picks_neighbours_by_their_distance() -> None:
    n = 2**16
    for number in (1 + 2**-7 * 0.25, -3.0 * (1 + 2**-7 * 0.25), 1e-3, 1.0, 0.0):
        values, rounded = torch.full((n,), number), torch.empty(n, dtype=torch.bfloat16)
        round_stochastically(values, noise(seed_of("w/1"), 0, n, CPU)[0], rounded)
        lower = torch.tensor(number).view(torch.int32).bitwise_and(-(2**16)).view(torch.float32)
        unit = float((torch.nextafter(lower.bfloat16().abs(), torch.tensor(torch.inf).bfloat16()) - lower.abs()).abs())
        assert float((rounded.double() - number).abs().max()) <= unit
        assert abs(float(rounded.double().mean()) - float(values[0])) <= 0.01 * unit


def test_noise_is_even_and_depends_on_key_and_position_alone() -> None:
    first, second = noise(seed_of("w/1"), 0, 2**16, CPU)
    for bits in (first, second):
        assert int(bits.min()) >= 0
        assert int(bits.max()) < 2**16
        counts = torch.bincount(bits // 2**12, minlength=16).double()
        assert float((counts / 2**12 - 1).abs().max()) < 0.1
    assert abs(float(torch.corrcoef(torch.stack((first, second)).double())[0, 1])) < 0.02
    later = noise(seed_of("w/1"), 1000, 50, CPU)
    assert torch.equal(later[0], first[1000:1050])
    assert not torch.equal(noise(seed_of("w/2"), 0, 2**16, CPU)[0], first)
    assert not torch.equal(noise(seed_of("v/1"), 0, 2**16, CPU)[0], first)
    far = noise(seed_of("w/1"), 2**32 - 10, 20, CPU)[0]
    assert torch.equal(far[10:], first[:10])


def test_a_moment_in_bfloat16_follows_small_changes() -> None:
    """The moment decays by 0.1 % a step, which is less than half a unit in the last place."""
    moment = torch.ones(4096, dtype=torch.bfloat16)
    for step in range(1000):
        round_stochastically(moment.float() * 0.999, noise(seed_of(f"w/{step}"), 0, 4096, CPU)[1], moment)
    assert abs(float(moment.float().mean()) / 0.999**1000 - 1) < 0.02
    assert (torch.ones((), dtype=torch.bfloat16) * 0.999).bfloat16() == 1


def test_many_small_additions_are_kept_which_rounding_to_the_nearest_loses() -> None:
    total, nearest = (torch.ones(4096, dtype=torch.bfloat16) for _ in range(2))
    rounding = GradientRounding("w")
    for _ in range(500):
        add_rounded(total, torch.full((4096,), 0.001), rounding.next_seed())
        nearest += 0.001
    assert float(total.float().mean()) == pytest.approx(1.5, abs=0.01)
    assert bool((nearest == 1).all())


def test_sums_that_are_not_finite_stay_so() -> None:
    # The last is the NaN of NVIDIA's GPUs, whose bits would overflow.
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    values.view(torch.int32)[3] = 0x7FFFFFFF
    total = torch.zeros(4, dtype=torch.bfloat16)
    for seed in range(100):
        add_rounded(total, values, seed)
        assert total[0] == torch.inf
        assert total[1] == -torch.inf
        assert bool(total[2:].isnan().all())


def test_the_seeds_of_a_sum_depend_on_key_step_and_addition_alone() -> None:
    first, second = GradientRounding("w"), GradientRounding("w")
    for rounding in (first, second):
        rounding.start(3)
    seeds = [first.next_seed() for _ in range(4)]
    assert [second.next_seed() for _ in range(4)] == seeds
    assert len(set(seeds)) == 4
    first.start(4)
    assert first.next_seed() not in seeds
    first.start(3)
    assert first.next_seed() == seeds[0]


@pytest.mark.parametrize("rows", [5, 10_000])
def test_a_product_is_summed_in_float32_and_rounded_once(rows: int) -> None:
    """Also in blocks of rows: of 64 sums, the mean is closer to the exact product than one is."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((rows, 7), (7, 8)))
    total = torch.zeros(rows + 3, 8, dtype=torch.bfloat16)
    vars(total)["rounding"] = GradientRounding("w")
    sums = []
    for _ in range(64):
        total.zero_()
        add_matmul(total, a, b)
        sums.append(total[:rows].double())
        assert not total[rows:].any()
    check_mean(torch.stack(sums), a.double() @ b.double())


def test_products_of_experts_are_rounded_stochastically() -> None:
    generator = torch.Generator().manual_seed(0)
    grad, rows = (torch.randn(45, width, generator=generator).bfloat16() for width in (24, 16))
    ends = torch.tensor([5, 5, 45], dtype=torch.int32)
    total = torch.zeros(3, 24, 16, dtype=torch.bfloat16)
    vars(total)["rounding"] = GradientRounding("w")
    sums = []
    for _ in range(64):
        total.zero_()
        add_grouped_product(total, grad, rows, ends)
        sums.append(total.double())
    parts = [(grad[start:stop].double().t() @ rows[start:stop].double()) for start, stop in ((0, 5), (5, 5), (5, 45))]
    check_mean(torch.stack(sums), torch.stack(parts))


def check_mean(sums: torch.Tensor, exact: torch.Tensor) -> None:
    """Check that sums [64, ...] are neighbours of the exact numbers in bfloat16, and that their mean is the number."""
    unit = exact.abs() * 2**-7
    assert bool(((sums - exact).abs() <= unit + 1e-6).all())
    off, off_on_average = ((values - exact).norm() / exact.norm() for values in (sums[0], sums.mean(0)))
    assert 1e-3 < float(off) < 4e-3
    assert float(off_on_average) < 0.2 * float(off)
