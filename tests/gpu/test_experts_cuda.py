"""Grouped matmuls of the experts on a GPU, where the number of routed rows is any."""

from __future__ import annotations

import pytest
import torch

from fivefold.mcore.experts import GroupedLinear

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("sizes", [(13, 0, 5), (1, 0, 0), (0, 0, 0), (64, 64, 1)], ids=str)
@pytest.mark.parametrize(("n_in", "n_out"), [(64, 128), (128, 8), (60, 128), (64, 10)])
def test_every_group_is_multiplied_by_its_own_weight(sizes: tuple[int, ...], n_in: int, n_out: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), n_in, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
    weight = torch.randn(len(sizes), n_out, n_in, generator=generator).to("cuda", torch.bfloat16).requires_grad_()
    grad = torch.randn(sum(sizes), n_out, generator=generator).to("cuda", torch.bfloat16)
    out = GroupedLinear.apply(x, weight, torch.tensor(sizes, device="cuda").cumsum(0, dtype=torch.int32))
    out.backward(grad)

    exact_x, exact_weight = (tensor.detach().float().requires_grad_() for tensor in (x, weight))
    rows = exact_x.split(list(sizes))
    exact = torch.cat([part @ exact_weight[group].t() for group, part in enumerate(rows)])
    exact.backward(grad.float())
    for got, wanted in ((out, exact), (x.grad, exact_x.grad), (weight.grad, exact_weight.grad)):
        torch.testing.assert_close(got.float(), wanted, rtol=0.02, atol=0.02)


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
