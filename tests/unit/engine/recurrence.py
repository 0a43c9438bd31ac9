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


def check_delta_rule(
    per_head: int,
    device: str,
    rule: Callable[..., Tensor] = gated_delta_rule,
    dtype: torch.dtype = torch.float32,
    widths: tuple[int, int] = (12, 5),
    error: float = 1e-5,
) -> None:
    """Compare outputs and gradients of a rule with those of the recurrence.

    Args:
        per_head: value heads for each key head.
        device: where the rule computes.
        rule: what is checked.
        dtype: its dtype for all but the decays, which are float32.
        widths: channels of a key and of a value.
        error: largest difference, as a share of the largest number.
    """
    generator = torch.Generator().manual_seed(per_head)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(sum(SPANS), *shape, dtype=torch.float64, generator=generator)

    n_heads, (keys, values) = 2 * per_head, widths
    inputs = [drawn(2, keys), drawn(2, keys), drawn(n_heads, values), -drawn(n_heads).exp(), drawn(n_heads).sigmoid()]
    dtypes = [dtype, dtype, dtype, torch.float32, dtype]
    inputs = [each.to(its).double() for each, its in zip(inputs, dtypes, strict=True)]
    weight = drawn(n_heads, values).to(dtype).double()

    def passed(rule: Callable[..., Tensor], is_exact: bool, where: str) -> list[Tensor]:
        chosen = [torch.float64] * len(inputs) if is_exact else dtypes
        leaves = [each.to(where, its, copy=True).requires_grad_() for each, its in zip(inputs, chosen, strict=True)]
        output = rule(*leaves, SPANS)
        (output * weight.to(where, output.dtype)).sum().backward()
        results = [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
        return [result.cpu().double() for result in results]

    wanted = passed(recurrence, True, "cpu")
    for found, exact in zip(passed(rule, False, device), wanted, strict=True):
        assert (found - exact).abs().max() < error * exact.abs().max()
