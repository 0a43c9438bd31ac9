"""Memory of a rank on FSDP2: permanent shards, and weights and gradients that are gathered and reduced temporarily.

    shards (permanent) master weights and gradients in float32, and two moments, each 1 / (dp * cp) of the model
    root unit          embedding, last norm and output layer, gathered during both passes
    layers             the current one and the next are gathered; the gradient of one is summed in float32
    output layer       its gradient waits for the embedding's, until no activations are left
    activations        of transformers' own layers, which tensor parallelism divides only inside a block

A frozen model only has shards in its own dtype. The counts follow from what PyTorch's autograd saves in these layers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fivefold.families.shape import ModelShape
from fivefold.families.tensors import WeightTensor
from fivefold.layout.parallel import ParallelLayout
from fivefold.planning.activations import delta_net_bytes, head_bytes
from fivefold.planning.dropout import dropped_bytes, is_of_experts
from fivefold.planning.memory import (
    COMMUNICATOR,
    CUDA_CONTEXT,
    LIBRARY_WORKSPACE,
    SNAPSHOT_BYTES,
    RankMemory,
    token_bytes,
    update_bytes,
)
from fivefold.planning.stages import Stage, rank_parameters, stages, trained_rank_parameters
from fivefold.planning.vision import tower_bytes
from fivefold.planning.workload import Workload

_FLOAT = 4


def fsdp_memory(
    layout: ParallelLayout,
    shape: ModelShape,
    work: Workload,
    *,
    reference: ModelShape | None = None,
    is_trained: bool = True,
) -> RankMemory:
    """Return the memory of a rank; `reference` is a frozen model in the same processes."""
    [stage] = stages(layout, shape)
    parameters = rank_parameters(layout, shape, stage).total
    ranks, element = layout.dp * layout.cp, work.element_bytes
    sharded = trained_rank_parameters(layout, shape, stage).total / ranks
    activations, temporaries = _activations(layout, shape, stage, work)
    layers = [_layer_parameters(layout, shape, layer) for layer in range(shape.n_layers)]
    layer, root = max(layers), parameters - sum(layers)
    output = 0 if shape.value_head else element * shape.vocab * shape.hidden / layout.tp
    ahead = min((2 + work.prefetched) * layer, parameters - root)
    kept = work.kept_gathered * (parameters - root)
    gathered = kept if work.kept_gathered == 1 else kept + ahead
    # Reduced in float32: for bfloat16, this is a second copy of the gradient.
    summed = element + _FLOAT if element < _FLOAT else element
    # The shards are float32, so they are their own master weights.
    masters = replace(work, element_bytes=_FLOAT)
    moments = int(sharded * work.state.of(masters.element_bytes))
    frozen = 0 if reference is None else rank_parameters(layout, reference, stages(layout, reference)[0]).total
    communicators = sum(size > 1 for size in (layout.tp, layout.cp, ranks))
    return RankMemory(
        stage=0,
        weights=int(sharded * (_FLOAT if is_trained else element) + (parameters / ranks - sharded) * element),
        reference=int(frozen / ranks * element),
        gradients=int(sharded * _FLOAT),
        optimizer=0 if work.state.on_host else moments,
        host_optimizer=moments if work.state.on_host else 0,
        snapshot=int(SNAPSHOT_BYTES * sharded),
        update=max(update_bytes(masters, sharded), int(summed * root) if is_trained else 0),
        sending=0,
        activations=activations,
        in_flight=1.0,
        logprobs=head_bytes(shape, layout, work),
        temporaries=temporaries + (int(summed * layer + output) if is_trained else 0),
        buffers=int(element * (root + gathered) + token_bytes(layout, shape, work) + LIBRARY_WORKSPACE)
        + tower_bytes(shape, work.tokens_per_micro_batch, element),
        context=CUDA_CONTEXT + COMMUNICATOR * communicators,
    )


def _layer_parameters(layout: ParallelLayout, shape: ModelShape, layer: int) -> int:
    """Return the parameters of one layer on one tensor-parallel rank."""
    chunks, n_moe = (range(layer, layer + 1),), int(shape.moe_layers[layer])
    alone = Stage(index=0, chunks=chunks, n_moe=n_moe, has_embedding=False, has_head=False)
    return rank_parameters(layout, shape, alone).total


def _activations(layout: ParallelLayout, shape: ModelShape, stage: Stage, work: Workload) -> tuple[int, int]:
    """Return (bytes that a micro-batch keeps, bytes that a layer needs temporarily)."""
    tokens = work.tokens_per_micro_batch / layout.cp
    stream = tokens * shape.hidden * work.element_bytes
    kept = temporary = 0.0
    for sort, count in stage.sorts(shape).items():
        mlp, mlp_backward = (_moe if sort.is_moe else _dense_mlp)(shape, layout, work, tokens)
        mixer, mixer_backward = _mixer(shape, layout, work, tokens, is_delta=sort.is_delta)
        dropped = dropped_bytes(shape, sort, work.element_bytes, partial(_adapter_tokens, shape, layout, tokens))
        mlp, mixer = mlp + dropped.mlp, mixer + dropped.mixer
        backward = max(mlp_backward, mixer_backward - mlp) + 2 * stream
        if work.recompute == "full":
            kept += count * stream
            backward += mixer + mlp
        else:
            kept += count * (mixer + mlp)
        temporary = max(temporary, backward)
    return int(kept), int(temporary)


def _adapter_tokens(shape: ModelShape, layout: ParallelLayout, tokens: float, a: WeightTensor) -> float:
    """Return the inputs of an adapter on a rank, divided by their width."""
    own = tokens / layout.tp if a.cut == "columns" else tokens
    return own * shape.top_k if is_of_experts(a) else own


def _norm(shape: ModelShape, width: float, element: int) -> float:
    """Return the bytes per token that a norm saves: its input in float32, the normalized value, and its output.

    A norm that multiplies by 1 + weight does so in float32.
    """
    return width * (_FLOAT + (_FLOAT if shape.zero_centered_norms else element) + element)


def _mixer(
    shape: ModelShape, layout: ParallelLayout, work: Workload, tokens: float, *, is_delta: bool
) -> tuple[float, float]:
    """Return the bytes of a layer's norms and of what mixes its tokens: (saved, needed by the backward pass)."""
    norms = (4 if shape.sandwich_norms else 2) * tokens * _norm(shape, shape.hidden, work.element_bytes)
    if is_delta and shape.delta is not None:
        saved, backward = delta_net_bytes(shape.delta, layout, work, tokens)
        return norms + saved, backward
    # Attention needs less in its backward pass than any MLP.
    return norms + _attention(shape, layout, work, tokens), 0.0


def _attention(shape: ModelShape, layout: ParallelLayout, work: Workload, tokens: float) -> float:
    """Return the bytes that attention saves."""
    element, tp = work.element_bytes, layout.tp
    keys = shape.key_width + shape.value_width
    key_tokens = tokens * layout.seen_tokens
    saved = element * (tokens * (shape.query_width + shape.output_width) + key_tokens * keys) / tp
    saved += _FLOAT * tokens * shape.n_heads / tp
    if shape.latent is not None and layout.cp > 1:
        saved += element * key_tokens * shape.latent.shared_dim
    if shape.qk_norm:
        saved += tokens * _norm(shape, shape.query_width + shape.key_width, element) / tp
    if shape.output_gate:
        # The gate's sigmoid and the product; the output is kept anyway.
        saved += 2 * element * tokens * shape.output_width / tp
    return saved


def _dense_mlp(shape: ModelShape, layout: ParallelLayout, work: Workload, tokens: float) -> tuple[float, float]:
    """Return the bytes of a dense MLP, (saved, backward): gate, silu(gate), up and their product are saved."""
    width = work.element_bytes * tokens * shape.ffn_hidden / layout.tp
    return 4 * width, 3 * width


def _moe(shape: ModelShape, layout: ParallelLayout, work: Workload, tokens: float) -> tuple[float, float]:
    """Return the bytes of router, experts and shared expert: (saved, backward)."""
    element, rows = work.element_bytes, tokens * shape.top_k
    width = shape.expert_ffn_hidden / layout.tp
    saved = rows * element * (2 * shape.hidden + 4 * width) + tokens * 2 * _FLOAT * shape.n_experts
    saved += tokens * element * (4 * shape.shared_expert_ffn_hidden / layout.tp + shape.hidden)
    return saved, rows * element * (2 * shape.hidden + 3 * width)
