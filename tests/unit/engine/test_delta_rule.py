"""The gated delta rule by chunks against its recurrence, token by token and in double precision."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fivefold.engine.kernels.delta_rule import gated_delta_rule, packed_convolution

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


@pytest.mark.parametrize("per_head", [1, 3])
def test_outputs_and_gradients_are_those_of_the_recurrence(per_head: int) -> None:
    generator = torch.Generator().manual_seed(per_head)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(sum(SPANS), *shape, dtype=torch.float64, generator=generator)

    n_heads = 2 * per_head
    inputs = [drawn(2, 12), drawn(2, 12), drawn(n_heads, 5), -drawn(n_heads).exp(), drawn(n_heads).sigmoid()]
    weight = drawn(n_heads, 5)

    def passed(rule: object, dtype: torch.dtype) -> list[Tensor]:
        leaves = [each.to(dtype).requires_grad_() for each in inputs]
        output = rule(*leaves, SPANS)  # type: ignore[operator]
        (output.double() * weight).sum().backward()
        return [output.detach().double(), *(leaf.grad.double() for leaf in leaves if leaf.grad is not None)]

    for found, wanted in zip(passed(gated_delta_rule, torch.float32), passed(recurrence, torch.float64), strict=True):
        assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_a_convolution_sees_nothing_before_its_sequence() -> None:
    x_TC, weight_C1K = torch.randn(sum(SPANS), 6), torch.randn(6, 1, 4)
    wanted = []
    for sequence_LC in x_TC.split(list(SPANS)):
        for t in range(len(sequence_LC)):
            seen = [sequence_LC[t - back] * weight_C1K[:, 0, 3 - back] for back in range(min(t + 1, 4))]
            wanted.append(torch.stack(seen).sum(0))
    torch.testing.assert_close(packed_convolution(x_TC, weight_C1K, SPANS), torch.stack(wanted))
