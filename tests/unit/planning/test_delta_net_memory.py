"""The memory of a gated delta net against its passes on the CPU, where every storage is counted while it is alive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.config.load import load_any_recipe
from fivefold.engine import delta_net
from fivefold.engine.delta_net import DeltaWeights, mix_tokens
from fivefold.engine.kernels import delta_rule
from fivefold.families import fla_core
from fivefold.families.delta_net import CHUNK, DeltaNet
from fivefold.layout.parser import parse_backend
from fivefold.planning import activations
from fivefold.planning.activations import delta_net_bytes
from fivefold.planning.recipe_inputs import Changes, recipe_inputs
from fivefold.planning.workload import Workload
from tests.unit.planning.live_bytes import LiveBytes

RECIPE = Path(__file__).parents[3] / "recipes" / "qwen3-30b-a3b-4xh200.yaml"


class Alone:
    """The group of a process without others."""

    def size(self) -> int:
        return 1


class FlaRule(torch.autograd.Function):
    """What fla-core 0.6.0 allocates and keeps, read from its sources, without what it computes."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        query, key, value, decay, beta = (each.contiguous() for each in inputs)
        normed = [torch.empty_like(each) for each in (query, key)]
        lengths = [each.new_empty(each.shape[:2], dtype=torch.float32) for each in (query, key)]
        products = value.new_zeros(*value.shape[:2], CHUNK)
        kept = _written(normed[1], value)
        output = torch.empty_like(value)
        ctx.save_for_backward(*normed, *lengths, value, torch.empty_like(decay), beta, products)
        del kept
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, _, _, value, decay, beta, _ = ctx.saved_tensors
        grad = grad.contiguous()
        d_query, d_key, d_value, d_beta, d_decay = _gradients(query, key, value, decay, beta)
        return torch.empty_like(d_query), torch.empty_like(d_key), d_value, d_decay, d_beta


def _written(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what a pass writes: w and u, the states of chunks, and the new values."""
    n_tokens, n_heads, width = value.shape
    of_key = value.new_empty(n_tokens, n_heads, key.shape[2])
    states = value.new_empty(n_tokens // CHUNK, n_heads, key.shape[2], width)
    return of_key, torch.empty_like(value), states, torch.empty_like(value)


def _gradients(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    w, u, states, new = _written(key, value)
    d_value = torch.empty_like(value)
    d_states, d_value = torch.empty_like(states), torch.empty_like(d_value)
    d_query, d_key, d_w, d_decay = _of_products(query, w, decay)
    d_key2 = w.new_empty(w.shape)
    d_value, d_decay2, d_beta = torch.empty_like(value), torch.empty_like(decay), torch.empty_like(beta)
    d_key2 = _of_heads(d_key2, key)
    d_key.add_(d_key2)
    d_decay.add_(d_decay2)
    alive = (w, u, states, new, d_states, d_w)
    del alive
    return d_query, d_key, d_value, d_beta, torch.empty_like(d_decay)


def _of_products(query: torch.Tensor, w: torch.Tensor, decay: torch.Tensor) -> tuple[torch.Tensor, ...]:
    d_query, d_key = w.new_empty(w.shape), w.new_empty(w.shape)
    d_decay, d_w = decay.new_empty(1, *decay.shape), torch.empty_like(w)
    d_query = _of_heads(d_query, query)
    d_key = _of_heads(d_key, query)
    return d_query, d_key, d_w, d_decay.sum(0)


def _of_heads(gradient: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Return the sum over the value heads of each key head."""
    n_tokens, n_heads, width = heads.shape
    return gradient if n_heads == gradient.shape[1] else gradient.view(n_tokens, n_heads, -1, width).sum(2)


@pytest.mark.parametrize(
    ("sizes", "fla"),
    [
        (DeltaNet(4, 8, 64, 64, 4, is_grouped=True), False),
        (DeltaNet(4, 12, 32, 96, 4, is_grouped=True), False),
        (DeltaNet(2, 4, 128, 128, 4, is_grouped=True), False),
        (DeltaNet(2, 4, 128, 128, 4, is_grouped=True), True),
        (DeltaNet(4, 4, 128, 128, 4, is_grouped=True), True),
    ],
    ids=["shared keys", "wide values", "published", "published, fla-core", "own keys, fla-core"],
)
def test_saved_bytes_and_the_peak_of_the_backward_pass_are_the_planned_ones(
    sizes: DeltaNet, fla: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_net, "computes", lambda key, value: fla)
    monkeypatch.setattr(delta_net, "fla_gated_delta_rule", lambda *tensors: FlaRule.apply(*tensors[:5]))
    tokens = 1024
    projected = torch.randn(tokens, sizes.input_width, dtype=torch.bfloat16).requires_grad_()
    weights = DeltaWeights(
        torch.randn(sizes.convolved_width, 1, sizes.kernel, dtype=torch.bfloat16).requires_grad_(),
        torch.randn(sizes.n_value_heads, dtype=torch.bfloat16).requires_grad_(),
        torch.randn(sizes.n_value_heads, dtype=torch.bfloat16).requires_grad_(),
        torch.randn(sizes.value_dim, dtype=torch.bfloat16).requires_grad_(),
    )
    spans = (tokens // 2, tokens // 2)
    with LiveBytes(projected, *vars(weights).values()) as live:
        output = mix_tokens(projected, weights, sizes, spans, 1e-6, Alone())  # type: ignore[arg-type]
        saved = live.now
        gradient = torch.ones_like(output)
        before, live.most = live.now, 0
        torch.autograd.backward(output, gradient)
        peak = live.most - before
    work = Workload(tokens, 1, tokens, fla=fla)
    planned, temporary = delta_net_bytes(sizes, parse_backend("megatron:d1"), work, tokens)
    assert saved == pytest.approx(planned, rel=0.05)
    assert peak == pytest.approx(temporary, rel=0.05)


def test_chunks_are_as_long_as_planned() -> None:
    assert activations.CHUNK == delta_rule.CHUNK


@pytest.mark.parametrize(("installed", "fla"), [(True, True), (False, False)])
def test_a_plan_counts_what_the_installed_package_keeps(
    installed: bool, fla: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fla_core, "missing", lambda: None if installed else "it is missing")

    def work(model: str, *overrides: str) -> Workload:
        loaded = load_any_recipe(RECIPE, [f"actor.path={model}", *overrides])
        inputs = recipe_inputs(loaded, "h200-141g", Changes())
        return inputs.models["actor"].work

    assert work("Qwen3-Next-80B-A3B").fla == fla
    assert not work("Qwen3-30B-A3B").fla
    assert not work("Qwen3-Next-80B-A3B", "actor.megatron.use_deterministic_algorithms=true").fla
