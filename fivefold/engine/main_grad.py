"""Megatron DDP's gradient buffers: adding to them without a detour over `parameter.grad`."""

from __future__ import annotations

import torch


def main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """Return DDP's gradient buffer of this parameter, in the dtype of the sums; None if there is no DDP."""
    buffer: torch.Tensor | None = vars(weight).get("main_grad")
    return buffer


def mark_accumulated(weight: torch.Tensor) -> torch.Tensor | None:
    """Tell DDP that this micro-batch's gradient is in `main_grad` already. Returns what the backward pass must return.

    DDP's hook fires only on a gradient, so it gets one of undefined content, which it discards. A weight that is also
    the embedding (`zero_out_wgrad`) gets a real gradient from the embedding, which the hook must add: return None then.
    """
    if vars(weight).get("zero_out_wgrad", False):
        return None
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight)


def add_matmul(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a @ b to the matrix `total` in place, summed in float32 and rounded once, to the dtype of `total`."""
    if a.is_cuda and total.dtype == torch.float32 and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
