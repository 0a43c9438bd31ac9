"""Fused experts, whose matrices FSDP shards by rows.

    transformers    gate_up_proj        [E, 2F, H]
    here            gate_up_proj_rows   [E * 2F, H]; the module sees [E, 2F, H]

FSDP shards along the first dimension. By experts, more ranks than experts would hold nothing, and each layer would be
padded to as many experts as ranks when it is gathered.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from fivefold.families.tensors import Shape

_SUFFIX = "_rows"
_ONCE = "_once"
"""What the name of biases ends in that one rank adds to a sum over tensor-parallel ranks."""


def shard_by_rows(experts: nn.Module) -> None:
    """Replace the matrices [E, rows, width] of a module by parameters [E * rows, width]; the module sees no change."""
    views = {}
    for name, matrices in list(experts.named_parameters(recurse=False)):
        if matrices.dim() == 3:
            delattr(experts, name)
            experts.register_parameter(
                f"{name}{_SUFFIX}", nn.Parameter(matrices.detach().flatten(0, 1), matrices.requires_grad)
            )
            views[name] = property(_View(name, matrices.shape[0]))
    if views:
        experts.__class__ = type(type(experts).__name__, (type(experts),), views)


def add_once(experts: nn.Module, name: str, *, adds: bool) -> None:
    """Let a module see the biases [E, hidden] that `name` is, or zeros with their gradient on a rank that adds none."""
    biases = getattr(experts, name)
    delattr(experts, name)
    experts.register_parameter(f"{name}{_ONCE}", biases)
    views = {name: property(partial(_biases, name, adds))}
    experts.__class__ = type(type(experts).__name__, (type(experts),), views)


def _biases(name: str, adds: bool, experts: Any) -> Tensor:
    biases: Tensor = getattr(experts, f"{name}{_ONCE}")
    return biases if adds else biases - biases.detach()


def name_in_transformers(name: str) -> str:
    """Return the name that a parameter has in transformers."""
    return name.removesuffix(_SUFFIX).removesuffix(_ONCE)


def shape_in_transformers(name: str, shape: Shape, n_experts: int) -> Shape:
    """Return the shape that a parameter has in transformers, but for tensor parallelism.

    Args:
        name: its name here.
        shape: its shape here.
        n_experts: experts of a layer.
    """
    return (n_experts, shape[0] // n_experts, *shape[1:]) if name.endswith(_SUFFIX) else shape


class _View:
    """Returns the matrices of a module's experts, [E, rows, width]."""

    def __init__(self, name: str, n_experts: int) -> None:
        self._name = f"{name}{_SUFFIX}"
        self._n_experts = n_experts

    def __call__(self, experts: Any) -> Tensor:
        rows: Tensor = getattr(experts, self._name)
        return rows.unflatten(0, (self._n_experts, -1))
