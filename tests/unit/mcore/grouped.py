"""Grouped matmuls against a loop over the groups in double precision, on any device."""

from __future__ import annotations

import torch

from fivefold.mcore.layers import GroupedLinear


def check_grouped_linear(
    sizes: tuple[int, ...], n_in: int, n_out: int, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Check outputs and both gradients, for groups of `sizes` rows."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x = random(sum(sizes), n_in).requires_grad_()
    weight = random(len(sizes), n_out, n_in).requires_grad_()
    grad = random(sum(sizes), n_out)
    out = GroupedLinear.apply(x, weight, torch.tensor(sizes, device=device).cumsum(0, dtype=torch.int32))
    out.backward(grad)

    exact_x, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    rows = exact_x.split(list(sizes))
    exact = torch.cat([part @ exact_weight[group].t() for group, part in enumerate(rows)])
    exact.backward(grad.double())
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for got, wanted in ((out, exact), (x.grad, exact_x.grad), (weight.grad, exact_weight.grad)):
        assert got.is_contiguous()
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)


def check_main_grad(
    sizes: tuple[int, ...],
    n_in: int,
    n_out: int,
    dtype: torch.dtype,
    device: str = "cpu",
    total_dtype: torch.dtype = torch.float32,
) -> None:
    """Check the sum of 16 micro-batches' weight gradients in `main_grad` against the formula in double precision."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(len(sizes), n_out, n_in, generator=generator).to(device, dtype).requires_grad_()
    weight.main_grad = torch.zeros_like(weight, dtype=total_dtype)
    exact = torch.zeros(len(sizes), n_out, n_in, dtype=torch.float64, device=device)
    ends = torch.tensor(sizes, device=device).cumsum(0, dtype=torch.int32)
    for _ in range(16):
        x = torch.randn(sum(sizes), n_in, generator=generator).to(device, dtype)
        grad = torch.randn(sum(sizes), n_out, generator=generator).to(device, dtype)
        GroupedLinear.apply(x, weight, ends).backward(grad)
        parts = zip(grad.double().split(list(sizes)), x.double().split(list(sizes)), strict=True)
        exact += torch.stack([part.t() @ rows for part, rows in parts])
    scale = exact.abs().max().clamp(min=1e-12)
    # Rounding to bfloat16 in each micro-batch would be off by 1e-3 and more.
    tolerance = 1e-6 if total_dtype == torch.float32 else 0.02
    assert float((weight.main_grad.double() - exact).abs().max() / scale) <= tolerance
    assert weight.grad_added_to_main_grad
