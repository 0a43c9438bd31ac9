"""Floating-point operations of a model's training: of the forward pass, and of the gradients that it needs.

A product with a weight is computed once forward. Backward, it is computed once more for the weight's gradient, if it is
trained, and once for the gradient of what it multiplies, if something before it is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from functools import lru_cache

from fivefold.families.flops import BACKWARD_AND_FORWARD, ForwardFlops, PartFlops
from fivefold.families.registry import find_family
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import WeightTensor, embedding, tensors, trained_tensors


def training_flops(shape: ModelShape, lengths: Sequence[int], n_predicted: int) -> float:
    """Return the FLOPs of forward and backward over sequences of `lengths` tokens.

    `n_predicted` of all tokens get logits.
    """
    return with_backward(shape, ForwardFlops.of(shape).on(lengths, n_predicted)).total


def with_backward(shape: ModelShape, forward: PartFlops) -> PartFlops:
    """Return the FLOPs of forward and backward, by part, of a forward pass's."""
    return PartFlops(*(a * b for a, b in zip(astuple(forward), astuple(over_forward(shape)), strict=True)))


@dataclass
class _Counted:
    """Elements of weights: once, and as often as a training step multiplies with them."""

    once: float = 0.0
    passes: float = 0.0


@lru_cache(maxsize=64)
def over_forward(shape: ModelShape) -> PartFlops:
    """Return the FLOPs of forward and backward of each part over its forward FLOPs; 1 where nothing is trained yet.

    Whatever a layer trains, all of its inputs are taken to need a gradient. The adapters' own products do not count.
    """
    trained, own = trained_tensors(shape), tensors(shape)
    learning = [tensor for tensor in own if tensor.names[0] in trained]
    if len(learning) == len(own):
        return PartFlops(*(BACKWARD_AND_FORWARD for _ in fields(PartFlops)))
    first = min((_depth(tensor, shape) for tensor in learning), default=shape.n_layers + 1)
    counted = {part.name: _Counted() for part in fields(PartFlops)}
    for tensor in own:
        if (part := _part(tensor, shape)) is not None:
            # The look-up in a tied embedding is no product; its place as the output layer is after all layers.
            depth = shape.n_layers if part == "head" else _depth(tensor, shape)
            size = tensor.elements(1) * (tensor.n_experts or 1)
            counted[part].once += size
            counted[part].passes += size * (1 + (tensor.names[0] in trained) + (depth >= first))
    learnt = max(0, shape.n_layers - max(first, 0))
    counted["attention"] = _Counted(shape.n_layers, shape.n_layers + 2 * learnt)
    return PartFlops(**{part: each.passes / each.once if each.once else 1.0 for part, each in counted.items()})


def _depth(tensor: WeightTensor, shape: ModelShape) -> int:
    """Return the layer that a tensor is in: -1 for the embedding, the number of layers for what follows them."""
    if tensor.layer is not None:
        return tensor.layer
    return -1 if tensor.name == embedding(shape) else shape.n_layers


def _part(tensor: WeightTensor, shape: ModelShape) -> str | None:
    """Return the part with a tensor's products; None: it is a norm, a bias, a look-up or part of an adapter."""
    if len(tensor.shape) != 2 or tensor.adapts is not None:
        return None
    if tensor.layer is None:
        return None if tensor.name == embedding(shape) and not shape.tied_embeddings else "head"
    if tensor.n_experts is not None:
        return "experts"
    if ".self_attn." in tensor.name or ".linear_attn." in tensor.name:
        return "projections"
    moe = find_family(shape.family).moe
    return "router" if moe is not None and tensor.name.endswith(moe.router) else "dense_mlps"
