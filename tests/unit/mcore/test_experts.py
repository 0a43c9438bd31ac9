"""Grouped matmuls against a loop over the groups in double precision."""

from __future__ import annotations

import pytest
import torch

from fivefold.mcore.experts import GroupedLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(4, 4, 8), (5, 0, 8), (1, 0, 0), (0, 0, 0)], ids=str)
# Widths of 5 and 6 are what torch's own kernel refuses.
@pytest.mark.parametrize(("n_in", "n_out"), [(16, 24), (5, 24), (16, 6), (5, 6)])
def test_every_group_is_multiplied_by_its_own_weight(
    sizes: tuple[int, ...], n_in: int, n_out: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), n_in, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(len(sizes), n_out, n_in, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(sum(sizes), n_out, generator=generator).to(dtype)
    out = GroupedLinear.apply(x, weight, torch.tensor(sizes).cumsum(0, dtype=torch.int32))
    out.backward(grad)

    exact_x, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    rows = exact_x.split(list(sizes))
    exact = torch.cat([part @ exact_weight[group].t() for group, part in enumerate(rows)])
    exact.backward(grad.double())
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for got, wanted in ((out, exact), (x.grad, exact_x.grad), (weight.grad, exact_weight.grad)):
        assert got.is_contiguous()
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)
