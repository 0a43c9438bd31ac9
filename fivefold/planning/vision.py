"""Memory of a vision tower, which is whole on each rank that embeds tokens, and not trained."""

from __future__ import annotations

from fivefold.families.shape import ModelShape

_PARTS = 6
"""Tensors of the tower's width that a layer has at one time, besides the MLP: its input, a norm, q, k, v, a product."""


def tower_weights(shape: ModelShape, element_bytes: int) -> int:
    """Return the bytes of the tower's weights; 0 if the model sees no images."""
    return 0 if shape.vision is None else shape.vision.n_parameters * element_bytes


def tower_bytes(shape: ModelShape, tokens: float, element_bytes: int) -> int:
    """Return the bytes of the tower and of its pass over a micro-batch, as `tower_weights` and `pass_bytes`."""
    return tower_weights(shape, element_bytes) + pass_bytes(shape, tokens, element_bytes)


def pass_bytes(shape: ModelShape, tokens: float, element_bytes: int) -> int:
    """Return the bytes of the tower's pass over a micro-batch all of whose tokens are images.

    Args:
        shape: the model; without a tower, nothing is needed.
        tokens: tokens of the micro-batch, over its context-parallel ranks; one large image is not divided.
        element_bytes: bytes of a feature.
    """
    vision = shape.vision
    if vision is None:
        return 0
    patches = tokens * vision.merge**2
    layer = patches * (_PARTS * vision.hidden + vision.ffn_hidden)
    features = tokens * vision.out_hidden * (1 + vision.n_deepstack)
    return int((layer + features) * element_bytes)
