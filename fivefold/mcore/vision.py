"""Images in Megatron-Core's decoder: features in the place of embeddings, and added after the first layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fivefold.families.vision import VisionShape
from fivefold.vision.tower import VisionTower

if TYPE_CHECKING:
    from fivefold.mcore.layers import PackedSequences
    from fivefold.mcore.model import Decoder
    from fivefold.vision.local import LocalImages


@dataclass(frozen=True)
class Deepstack:
    """What the first layers add to their outputs."""

    rows_I: torch.Tensor
    """int64 [I]: rows of the hidden states."""
    features: tuple[torch.Tensor, ...]
    """[I, hidden] for each of the layers."""


def install_vision(decoders: Sequence[Decoder], vision: VisionShape, tower: VisionTower) -> None:
    """Let the decoder that embeds tokens see images, if it is among this rank's and has the layers for it."""
    for decoder in decoders:
        layers = list(decoder.decoder.layers)[: vision.n_deepstack]
        if decoder.pre_process and len(layers) == vision.n_deepstack:
            decoder.tower = tower
            for index, layer in enumerate(layers):
                layer.register_forward_hook(partial(_added, index), with_kwargs=True)


def with_images(
    hidden: torch.Tensor, images: LocalImages, packed: PackedSequences, tower: VisionTower
) -> tuple[torch.Tensor, PackedSequences]:
    """Return embeddings [T, 1, hidden] with features at the tokens of images, and what later layers add."""
    seen = images.seen(tower)
    hidden = hidden.index_copy(0, images.rows_I, seen.embeddings.unsqueeze(1))
    return hidden, replace(packed, deepstack=Deepstack(images.rows_I, seen.deepstack))


def _added(
    index: int, _layer: nn.Module, _args: Any, options: dict[str, Any], output: tuple[torch.Tensor, Any]
) -> tuple[torch.Tensor, Any] | None:
    """Add the features of a layer to its output; without images, the output stays."""
    deepstack: Deepstack | None = options["packed_seq_params"].deepstack
    if deepstack is None:
        return None
    hidden, context = output
    return hidden.index_add(0, deepstack.rows_I, deepstack.features[index].unsqueeze(1)), context
