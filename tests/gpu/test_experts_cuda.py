"""Grouped matmuls of the experts on a GPU, for any number of routed rows."""

from __future__ import annotations

import pytest
import torch

from fivefold.engine.kernels.matmul import add_grouped_product
from fivefold.engine.kernels.rounding import GradientRounding
from fivefold.mcore.layers import GroupedLinear
from tests.unit.mcore.grouped import check_grouped_linear, check_main_grad

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("sizes", [(13, 0, 5), (1, 0, 0), (0, 0, 0), (64, 64, 1)], ids=str)
@pytest.mark.parametrize(("n_in", "n_out"), [(64, 128), (128, 8), (60, 128), (64, 10)])
def test_every_group_is_multiplied_by_its_own_weight(sizes: tuple[int, ...], n_in: int, n_out: int) -> None:
    check_grouped_linear(sizes, n_in, n_out, torch.bfloat16, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(13, 0, 5), (0, 0, 0), (64, 200, 1), (700, 1, 129)], ids=str)
@pytest.mark.parametrize(("n_in", "n_out"), [(64, 128), (256, 200), (60, 136), (65, 10), (2048, 1536)])
def test_gradients_of_many_micro_batches_are_summed_in_float32(
    sizes: tuple[int, ...], n_in: int, n_out: int, dtype: torch.dtype
) -> None:
    check_main_grad(sizes, n_in, n_out, dtype, "cuda")


def test_gradients_that_are_kept_in_bfloat16_are_rounded_once_a_micro_batch() -> None:
    check_main_grad((64, 0, 100), 64, 136, torch.bfloat16, "cuda", total_dtype=torch.bfloat16)


@pytest.mark.parametrize(("n_in", "n_out"), [(64, 128), (65, 10), (2048, 1536)])
def test_sums_in_bfloat16_are_rounded_stochastically(n_in: int, n_out: int) -> None:
    """Each sum is a neighbour of the exact product, and their mean comes near it; a seed gives its bits again."""
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = (64, 0, 101)
    grad, rows = (
        torch.randn(sum(sizes), width, generator=generator, device="cuda").bfloat16() for width in (n_out, n_in)
    )
    ends = torch.tensor(sizes, device="cuda").cumsum(0, dtype=torch.int32)
    total = torch.zeros(len(sizes), n_out, n_in, dtype=torch.bfloat16, device="cuda")
    vars(total)["rounding"] = rounding = GradientRounding("w")
    mean = torch.zeros_like(total, dtype=torch.float64)
    for _ in range(64):
        total.zero_()
        add_grouped_product(total, grad, rows, ends)
        mean += total.double() / 64
    parts = zip(grad.double().split(sizes), rows.double().split(sizes), strict=True)
    exact = torch.stack([part.t() @ row for part, row in parts])
    off, off_on_average = (float((value - exact).norm() / exact.norm()) for value in (total.double(), mean))
    assert 1e-3 < off < 4e-3
    assert off_on_average < 0.2 * off
    again = torch.zeros_like(total)
    vars(again)["rounding"] = rounding
    rounding.start(0)
    for _ in range(64):
        again.zero_()
        add_grouped_product(again, grad, rows, ends)
    assert torch.equal(again, total)


def test_odd_numbers_of_rows_need_no_wait_for_the_device() -> None:
    x = torch.randn(13, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(3, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight.main_grad = torch.zeros(3, 128, 64, device="cuda")
    ends = torch.tensor([5, 5, 13], device="cuda", dtype=torch.int32)
    GroupedLinear.apply(x, weight, ends).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        GroupedLinear.apply(x, weight, ends).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
