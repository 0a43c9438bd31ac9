"""Names of a model's tensors in Megatron-Core: with the number of the layer in the whole model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from fivefold.bridge.megatron_names import UNFUSED_NORMS
from fivefold.mcore.model import Decoder


def named_tensors(chunks: list[Decoder]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's parameters under Megatron-Core's names, with each layer's index in the whole model.

    A norm has the name of the layer's own module also where it belongs to the linear layer after it. The offsets of
    routers, float32 [E], which are buffers, come last.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            yield global_name(chunk, name), parameter
    for chunk in chunks:
        for name, buffer in chunk.named_buffers():
            if name.endswith(".expert_bias"):
                yield global_name(chunk, name), buffer


def global_name(chunk: Decoder, name: str) -> str:
    """Return the name of a module or a parameter of a chunk, with its layer's index in the whole model."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + get_transformer_layer_offset(chunk.config, vp_stage=chunk.vp_stage))
        own = ".".join(parts[3:])
        parts[3:] = [UNFUSED_NORMS.get(own, own)]
    return ".".join(parts)
