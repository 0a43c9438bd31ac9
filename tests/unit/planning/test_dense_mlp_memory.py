"""The memory of a dense MLP against its passes on the CPU, where every storage is counted while it is alive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fivefold.families.read import find_shape
from fivefold.layout.parser import parse_backend
from fivefold.planning.activations import LayerCosts, layer_costs
from fivefold.planning.workload import Workload
from tests.unit.planning.live_bytes import LiveBytes

HIDDEN = 128


class Linear(torch.autograd.Function):
    """A linear layer as Megatron-Core's under DDP, where the weight's gradient only starts a hook."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, weight = ctx.saved_tensors
        return grad @ weight, torch.empty_like(weight)


def mlp(normed: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Compute Megatron-Core's MLP without fusions."""
    gate, value = torch.chunk(Linear.apply(normed, up), 2, dim=-1)
    return Linear.apply(F.silu(gate) * (value + 0.0), down)


class Recomputed(torch.autograd.Function):
    """The MLP under Megatron-Core's checkpoint, which keeps the input and computes the rest again."""

    @staticmethod
    def forward(ctx: Any, normed: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(normed, up, down)
        with torch.no_grad():
            return mlp(normed, up, down)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        normed, up, down = ctx.saved_tensors
        normed = normed.detach().requires_grad_()
        with torch.enable_grad():
            out = mlp(normed, up, down)
        torch.autograd.backward(out, grad)
        assert normed.grad is not None
        return normed.grad, None, None


@dataclass(frozen=True)
class Passes:
    """Bytes that a forward and a backward pass need."""

    saved: int
    """Bytes kept between the two, without the input and the output."""
    worst: int
    """Bytes at the worst moment of the backward pass, without `saved`, the output and its gradient."""


def passes(half: Callable[..., torch.Tensor], tokens: int, width: int) -> Passes:
    """Run `half`, the second half of a layer, on random tokens."""
    up, down = (torch.randn(*size, dtype=torch.bfloat16) for size in ((2 * width, HIDDEN), (HIDDEN, width)))
    stream = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16)
    for tensor in (up, down, stream):
        tensor.requires_grad_()
    for weight in (up, down):
        weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    with LiveBytes(up, down, stream) as live:
        out = half(stream, up, down)
        saved = live.now - out.untyped_storage().nbytes()
        grad = torch.ones_like(out)
        before, live.most = live.now, 0
        torch.autograd.backward(out, grad)
    return Passes(saved, live.most - before)


def planned(tokens: int, width: int) -> LayerCosts:
    shape = replace(find_shape("Qwen3-8B"), hidden=HIDDEN, ffn_hidden=width)
    return layer_costs(shape, parse_backend("megatron:d1"), Workload(tokens, 1, tokens), is_moe=False)


SIZES = pytest.mark.parametrize(("tokens", "width"), [(512, 384), (512, 1024), (64, 1024), (16, 512)])


@SIZES
def test_a_dense_mlp_needs_the_memory_that_is_planned(tokens: int, width: int) -> None:
    """The worst moment is at the activation, at the projection down, or (few tokens) at the projection up."""
    found, costs = passes(mlp, tokens, width), planned(tokens, width)
    assert found.saved == costs.mlp
    # The plan counts two gradients of the residual stream besides, which this piece of a layer has before it begins.
    assert found.worst == costs.mlp_backward - 2 * costs.input


@SIZES
def test_selective_recomputation_saves_nothing_and_needs_all_of_it_again(tokens: int, width: int) -> None:
    found, costs = passes(Recomputed.apply, tokens, width), planned(tokens, width)
    assert found.saved == 0
    # The output is computed again too, where the plan has the second of the two gradients.
    assert found.worst == costs.mlp + costs.mlp_backward - costs.input
