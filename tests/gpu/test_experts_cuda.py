"""Grouped matmuls of the experts on a GPU, for any number of routed rows."""

from __future__ import annotations

import pytest
import torch

from fivefold.mcore.experts import GroupedLinear
from tests.unit.mcore.grouped import check_grouped_linear

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("sizes", [(13, 0, 5), (1, 0, 0), (0, 0, 0), (64, 64, 1)], ids=str)
@pytest.mark.parametrize(("n_in", "n_out"), [(64, 128), (128, 8), (60, 128), (64, 10)])
def test_every_group_is_multiplied_by_its_own_weight(sizes: tuple[int, ...], n_in: int, n_out: int) -> None:
    check_grouped_linear(sizes, n_in, n_out, torch.bfloat16, "cuda")


def test_odd_numbers_of_rows_need_no_wait_for_the_device() -> None:
    x = torch.randn(13, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(3, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([5, 5, 13], device="cuda", dtype=torch.int32)
    GroupedLinear.apply(x, weight, ends).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        GroupedLinear.apply(x, weight, ends).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
