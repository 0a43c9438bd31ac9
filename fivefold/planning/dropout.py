"""Bytes that dropout on the inputs of adapters keeps for the backward pass: what is left of them, and which these are.

Each adapter drops inputs by itself, so that q, k and v keep three copies of what they see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fivefold.families.shape import LayerSort, ModelShape
from fivefold.families.tensors import WeightTensor, tensors


class Dropped(NamedTuple):
    """Bytes of one layer and one micro-batch on one rank."""

    mixer: float
    """Of attention or a gated delta net."""
    mlp: float


def dropped_bytes(
    shape: ModelShape, sort: LayerSort, element_bytes: int, tokens_of: Callable[[WeightTensor], float]
) -> Dropped:
    """Return what a layer of a sort keeps.

    Args:
        shape: the model as it is trained.
        sort: the sort of layer.
        element_bytes: bytes of an input.
        tokens_of: inputs on the rank of the adapter whose matrix A is given, divided by the width of A.
    """
    if shape.adapters is None or shape.adapters.dropout == 0:
        return Dropped(0.0, 0.0)
    layer = shape.layer_sorts.index(sort)
    of_mixer = of_mlp = 0.0
    for tensor in tensors(shape):
        if tensor.layer == layer and tensor.name.endswith("lora_A.weight"):
            kept = (element_bytes + 1) * tokens_of(tensor) * tensor.shape[1]
            if ".mlp." in tensor.name or is_of_experts(tensor):
                of_mlp += kept
            else:
                of_mixer += kept
    return Dropped(of_mixer, of_mlp)


def is_of_experts(tensor: WeightTensor) -> bool:
    """Return whether a matrix of an adapter is a routed expert's, or all experts have it in common."""
    return tensor.n_experts is not None or tensor.shared_by is not None
