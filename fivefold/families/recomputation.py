"""Floating-point operations that are repeated because activations are not kept, or ranks compute the same values.

    MFU   FLOPs of forward and backward                  / seconds / peak of the devices
    HFU   the same, and those that are computed again    / seconds / peak of the devices

The logits of the log-probs are always computed twice, chunk by chunk. Context-parallel ranks compute keys and values
from the same latents, in forward and backward passes (`keys_of_others`). Flash attention's own recomputation of the
scores is not counted.
"""

from __future__ import annotations

from collections.abc import Collection

from fivefold.config.schema.engine import EngineConfig
from fivefold.families.flops import BACKWARD_AND_FORWARD, PartFlops
from fivefold.families.shape import ModelShape
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.stages import chunk_sizes


def keys_of_latents(shape: ModelShape, layout: ParallelLayout) -> float:
    """Return the FLOPs that compute keys and values from exchanged latents, over the FLOPs of all projections.

    Context-parallel ranks exchange latents. Each one computes the keys of all tokens that its queries see.
    """
    if shape.latent is None or layout.cp == 1:
        return 0.0
    return layout.seen_tokens * shape.latent.key_value_parameters(shape.n_heads) / shape.projection_weights("latent")


def keys_of_others(shape: ModelShape, layout: ParallelLayout) -> float:
    """Return the part of `keys_of_latents` for latents of other ranks, which compute the same values."""
    return keys_of_latents(shape, layout) * (1 - 1 / layout.seen_tokens)


def repeated_shares(config: EngineConfig, layout: ParallelLayout, shape: ModelShape) -> PartFlops:
    """Return the FLOPs that a forward and a backward pass repeat, by part, over the forward pass's FLOPs of the part.

    Args:
        config: how the model is trained.
        layout: its layout; with pipeline stages, each may recompute only some of its layers.
        shape: the model.
    """
    head = 0.0 if shape.value_head else 1.0
    others = keys_of_others(shape, layout)
    again = PartFlops(BACKWARD_AND_FORWARD * others, 0.0, 0.0, 0.0, 0.0, head)
    if layout.backend == "fsdp":
        layers: Collection[int] = range(shape.n_layers) if config.fsdp.recompute == "full" else ()
        return _plus(again, _of_layers(shape, layers, others))
    section = config.megatron
    if section.recompute_granularity == "full":
        return _plus(again, _of_layers(shape, _recomputed_layers(config, layout, shape), others))
    modules = section.recompute_modules(is_moe=shape.is_moe)
    return _plus(again, _of_modules(shape, modules, keys_of_latents(shape, layout)))


def _plus(left: PartFlops, right: PartFlops) -> PartFlops:
    return PartFlops(**{name: value + getattr(right, name) for name, value in vars(left).items()})


def _recomputed_layers(config: EngineConfig, layout: ParallelLayout, shape: ModelShape) -> list[int]:
    """Return the layers that are recomputed as a whole: all, or (`block`) the first ones of each virtual stage."""
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


def _of_layers(shape: ModelShape, layers: Collection[int], others: float) -> PartFlops:
    """Return the shares of whole layers; `others` is what the keys of other ranks' latents add to the projections."""
    n_moe = sum(shape.moe_layers[layer] for layer in layers)
    mixers, attends = shape.mixer_shares(layers)
    moe_share = n_moe / shape.n_moe_layers if n_moe else 0.0
    n_dense = shape.n_layers - shape.n_moe_layers
    dense_share = (len(layers) - n_moe) / n_dense if n_dense else 0.0
    dense, shared = _dense_and_shared(shape)
    return PartFlops(
        projections=mixers * (1 + others),
        attention=attends,
        dense_mlps=moe_share * shared + dense_share * dense,
        experts=moe_share,
        router=moe_share,
        head=0.0,
    )


def _of_modules(shape: ModelShape, modules: Collection[str], keys: float) -> PartFlops:
    """Return the shares of modules with matmuls; norms and activations have none.

    `keys` is the share of the projections that computes keys and values from exchanged latents, part of attention.
    """
    dense, shared = _dense_and_shared(shape)
    attention, experts = float("core_attn" in modules), float("moe" in modules)
    mlps = dense * ("mlp" in modules) + shared * (("moe" in modules) + ("shared_experts" in modules))
    return PartFlops(keys * attention, attention, mlps, experts, experts, 0.0)


def _dense_and_shared(shape: ModelShape) -> tuple[float, float]:
    """Return the shares of dense MLPs and of shared experts in the FLOPs of both."""
    dense = (shape.n_layers - shape.n_moe_layers) * shape.dense_mlp_parameters
    shared = shape.n_moe_layers * shape.shared_expert_parameters
    return (dense / (dense + shared), shared / (dense + shared)) if dense + shared else (0.0, 0.0)
