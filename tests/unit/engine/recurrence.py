"""The gated delta rule as a recurrence, token by token and in double precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fivefold.engine.kernels.delta_rule import gated_delta_rule

SPANS = (37, 1, 150, 64, 5)
"""Less than a chunk, one token, several chunks, one chunk, and the last one shorter than the convolution's context."""


def recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, spans: Sequence[int]) -> Tensor:
    """S <- exp(g) S; S <- S + k (beta (v - S^T k))^T; o = S^T q, each sequence from S = 0."""
    n_heads, per_head = value.shape[1], value.shape[1] // key.shape[1]
    query, key = (
        (heads / (heads.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(per_head, dim=1)
        for heads in (query, key)
    )
    outputs = []
    for sequence in torch.arange(sum(spans)).split(list(spans)):
        state = query.new_zeros(n_heads, key.shape[2], value.shape[2])
        for t in sequence:
            state = decay[t].exp()[:, None, None] * state
            error = value[t] - torch.einsum("hde,hd->he", state, key[t])
            state = state + torch.einsum("hd,he->hde", key[t], beta[t][:, None] * error)
            outputs.append(torch.einsum("hde,hd->he", state, query[t]) / key.shape[2] ** 0.5)
    return torch.stack(outputs)


def check_delta_rule(per_head: int, device: str) -> None:
    """Compare outputs and gradients, of `per_head` value heads for each key head, with those of the recurrence."""
    generator = torch.Generator().manual_seed(per_head)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(sum(SPANS), *shape, dtype=torch.float64, generator=generator)

    n_heads = 2 * per_head
    inputs = [drawn(2, 12), drawn(2, 12), drawn(n_heads, 5), -drawn(n_heads).exp(), drawn(n_heads).sigmoid()]
    weight = drawn(n_heads, 5)

    def passed(rule: Callable[..., Tensor], dtype: torch.dtype, where: str) -> list[Tensor]:
        leaves = [each.to(where, dtype, copy=True).requires_grad_() for each in inputs]
        output = rule(*leaves, SPANS)
        (output * weight.to(where, dtype)).sum().backward()
        results = [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        return [result.cpu().double() for result in results]

    wanted = passed(recurrence, torch.float64, "cpu")
    for found, exact in zip(passed(gated_delta_rule, torch.float32, device), wanted, strict=True):
        assert (found - exact).abs().max() < 1e-5 * exact.abs().max()
