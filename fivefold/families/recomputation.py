"""Floating-point operations that are repeated: a recipe does not keep all activations, or ranks compute the same.

    MFU   FLOPs of forward and backward                  / seconds / what the devices can do
    HFU   the same, and those that are computed again    / seconds / what the devices can do

The log-probs' logits are computed twice in any case, chunk by chunk. Context-parallel ranks make keys and values of the
same latents, in forward and backward passes (`keys_of_others`). Flash attention's own repetition of the scores is
not counted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from fivefold.config.schema.engine import EngineConfig
from fivefold.families.flops import BACKWARD_AND_FORWARD, PartFlops, keys_of_latents, keys_of_others
from fivefold.families.shape import ModelShape
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.stages import chunk_sizes


def repeated_flops(forward: PartFlops, config: EngineConfig, layout: ParallelLayout, shape: ModelShape) -> float:
    """Return the FLOPs of a forward and a backward pass that are computed again.

    Args:
        forward: FLOPs of the forward pass that it belongs to.
        config: how the model is trained.
        layout: how it is laid out, whose stages may recompute some of their layers only.
        shape: the model.
    """
    logits = 0.0 if shape.value_head else forward.head
    others = forward.projections * keys_of_others(shape, layout)
    again = logits + BACKWARD_AND_FORWARD * others
    whole = replace(forward, projections=forward.projections + others)
    if layout.backend == "fsdp":
        return again + (_of_layers(whole, shape, range(shape.n_layers)) if config.fsdp.recompute == "full" else 0.0)
    section = config.megatron
    if section.recompute_granularity == "full":
        return again + _of_layers(whole, shape, _recomputed_layers(config, layout, shape))
    keys = forward.projections * keys_of_latents(shape, layout)
    return again + _of_modules(forward, shape, section.recompute_modules(is_moe=shape.is_moe), keys)


def _recomputed_layers(config: EngineConfig, layout: ParallelLayout, shape: ModelShape) -> list[int]:
    """Return the layers that are recomputed whole: all, or (`block`) the first ones of each virtual stage."""
    fields = config.megatron.transformer
    if fields.recompute_method != "block":
        return list(range(shape.n_layers))
    count = fields.recompute_num_layers or 1
    layers: list[int] = []
    start = 0
    for size in chunk_sizes(shape.n_layers, layout.pp, layout.vpp, layout.split):
        layers += range(start, start + min(count, size))
        start += size
    return layers


def _of_layers(forward: PartFlops, shape: ModelShape, layers: Collection[int]) -> float:
    n_moe = sum(shape.moe_layers[layer] for layer in layers)
    share = len(layers) / shape.n_layers
    moe_share = n_moe / shape.n_moe_layers if n_moe else 0.0
    dense, shared = _dense_and_shared(forward, shape)
    n_dense = shape.n_layers - shape.n_moe_layers
    dense_share = (len(layers) - n_moe) / n_dense if n_dense else 0.0
    return (
        share * (forward.projections + forward.attention)
        + moe_share * (forward.experts + forward.router + shared)
        + dense_share * dense
    )


def _of_modules(forward: PartFlops, shape: ModelShape, modules: Collection[str], keys: float) -> float:
    """Return the matmuls of the modules; norms and activations have none.

    `keys` are those of keys and values that are made of exchanged latents, which belong to attention.
    """
    dense, shared = _dense_and_shared(forward, shape)
    flops = {
        "core_attn": forward.attention + keys,
        "mlp": dense,
        "moe": forward.experts + forward.router + shared,
        "shared_experts": shared,
    }
    return sum(flops.get(module, 0.0) for module in modules)


def _dense_and_shared(forward: PartFlops, shape: ModelShape) -> tuple[float, float]:
    """Return the FLOPs of all dense MLPs, and those of all shared experts."""
    dense = (shape.n_layers - shape.n_moe_layers) * shape.dense_mlp_parameters
    shared = shape.n_moe_layers * shape.shared_expert_parameters
    each = forward.dense_mlps / (dense + shared) if dense + shared else 0.0
    return each * dense, each * shared
