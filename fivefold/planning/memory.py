"""Peak memory of each rank in a step, by kind, on Megatron-Core (FSDP: `fsdp_memory`).

The state persists from step to step: weights, gradients, and the optimizer's master weights and two moments, which the
distributed optimizer shards over data-parallel ranks (ZeRO stage 1, https://arxiv.org/abs/1910.02054) and which may be
in host memory. On top of it come the activations of the micro-batches in flight, and between forward and backward
either the log-prob chunk (on the last stage) or the temporaries of a layer's backward pass, never both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from fivefold.config.schema.role import Offloadable
from fivefold.config.state_buckets import BUCKET_SIZE, SLOTS
from fivefold.families.shape import LayerSort, ModelShape
from fivefold.layout.parallel import ParallelLayout
from fivefold.planning.activations import LayerCosts, head_bytes, layer_costs
from fivefold.planning.stages import Stage, rank_parameters, stages, trained_rank_parameters
from fivefold.planning.vision import tower_bytes
from fivefold.planning.workload import Workload

_FLOAT, _INDEX = 4, 8

CUDA_CONTEXT = 700_000_000
"""Bytes of the driver, kernels and cuBLAS handles of one process."""
COMMUNICATOR = 250_000_000
"""Bytes of the buffers of one NCCL communicator within a node, outside torch's allocator."""
LIBRARY_WORKSPACE = 70_000_000
"""Bytes of cuBLAS workspaces, which torch allocates."""
SNAPSHOT_BYTES = 12
"""Bytes of a parameter in a checkpoint, for every format of the optimizer's state."""
UPDATE_SCRATCH = 12
"""Bytes per element of a bucket whose state is not all float32: its master weight and moments in float32."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank of a pipeline stage."""

    stage: int
    weights: int
    reference: int
    """Weights of a frozen reference model in the same process."""
    gradients: int
    optimizer: int
    """Master weights and moments that stay on the GPU."""
    host_optimizer: int
    """Master weights and moments in host memory."""
    snapshot: int
    """Host memory of the float32 copy of master weights and moments from which a checkpoint is written."""
    update: int
    """Buckets of state that pass through the GPU during the update, when no activations are alive."""
    sending: int
    """Buckets in which weights go to a rollout, when no activations are alive."""
    activations: int
    in_flight: float
    """Micro-batches whose activations are held at one time; a fraction if stages are interleaved."""
    logprobs: int
    """Hidden states and logits of a chunk, on the last stage."""
    temporaries: int
    """Peak of a layer's passes. It is never alive together with `logprobs`."""
    buffers: int
    """Gathered hidden states, pipeline receives, the step's tokens, library workspaces, and a vision tower."""
    context: int
    """CUDA context and NCCL, which are not in torch's statistics."""
    host_reference: int = 0
    """Host memory of a reference's weights that are off the GPU, and of its EMA."""
    frozen: int = 0
    """Bytes of `weights` that may pass through the GPU part by part on their way to a rollout; they are not trained."""

    @property
    def resident(self) -> int:
        """Bytes that persist between steps."""
        return self.weights + self.reference + self.gradients + self.optimizer

    @property
    def allocated(self) -> int:
        """Bytes that `torch.cuda.max_memory_allocated` would report."""
        passes = self.activations + max(self.logprobs, self.temporaries)
        return self.resident + max(passes, self.update, self.sending) + self.buffers

    @property
    def total(self) -> int:
        """Bytes on the GPU, all kinds together."""
        return self.allocated + self.context

    def kept(self, offloaded: Collection[Offloadable]) -> int:
        """Return the bytes that stay on the GPU while the rank waits and `offloaded` is moved off it.

        A reference model in the same process moves with the parameters.
        """
        params = 0 if "params" in offloaded else self.weights + self.reference
        gradients = 0 if "grads" in offloaded else self.gradients
        return params + gradients + (0 if "optimizer" in offloaded else self.optimizer) + self.context

    def on_host(self, offloaded: Collection[Offloadable]) -> int:
        """Return the bytes of host memory for the rank's state, without the copy for checkpoints.

        Gradients are not copied there.
        """
        params = self.weights + self.reference if "params" in offloaded else 0
        optimizer = self.optimizer if "optimizer" in offloaded else 0
        return self.host_optimizer + self.host_reference + params + optimizer


def training_memory(
    layout: ParallelLayout, shape: ModelShape, work: Workload, *, reference: ModelShape | None = None
) -> tuple[RankMemory, ...]:
    """Return the memory of a rank of each pipeline stage. `reference` is a frozen model in the same processes."""
    costs = {sort: layer_costs(shape, layout, work, **sort._asdict()) for sort in set(shape.layer_sorts)}
    trained = [_stage_memory(layout, shape, work, stage, costs) for stage in stages(layout, shape)]
    if reference is None:
        return tuple(trained)
    frozen = (rank_parameters(layout, reference, stage).total for stage in stages(layout, reference))
    return tuple(
        replace(stage, reference=parameters * work.element_bytes)
        for stage, parameters in zip(trained, frozen, strict=True)
    )


def _stage_memory(
    layout: ParallelLayout,
    shape: ModelShape,
    work: Workload,
    stage: Stage,
    costs: dict[LayerSort, LayerCosts],
) -> RankMemory:
    weights = rank_parameters(layout, shape, stage).total * work.element_bytes
    parameters = trained_rank_parameters(layout, shape, stage)
    state_bytes = work.state.of(work.element_bytes)
    sharded = parameters.dense / (layout.dp * layout.cp) + parameters.experts / layout.edp
    kept, temporaries = _kept_and_temporary(shape, stage, work, costs)
    in_flight = micro_batches_in_flight(layout, work, stage.index)
    stream = next(iter(costs.values())).input
    outputs = stream if layout.pp > 1 and not stage.has_head else 0
    return RankMemory(
        stage=stage.index,
        weights=weights,
        reference=0,
        gradients=parameters.total * work.gradient_bytes,
        optimizer=0 if work.state.on_host else int(state_bytes * sharded),
        host_optimizer=int(state_bytes * sharded) if work.state.on_host else 0,
        snapshot=int(SNAPSHOT_BYTES * sharded),
        update=update_bytes(work, sharded),
        sending=0,
        activations=int(in_flight * (kept + outputs * layout.vpp)),
        in_flight=in_flight,
        logprobs=head_bytes(shape, layout, work) if stage.has_head else 0,
        temporaries=temporaries,
        buffers=_buffers(layout, shape, work, stream, sees=stage.has_embedding),
        context=CUDA_CONTEXT + COMMUNICATOR * _n_communicators(layout, shape),
        frozen=weights - parameters.total * work.element_bytes if work.sends_parts else 0,
    )


def update_bytes(work: Workload, sharded: float) -> int:
    """Return the bytes of the buckets on the GPU during the update, besides state that is always there."""
    element, state = work.element_bytes, work.state
    size = min(BUCKET_SIZE, sharded)
    slots = SLOTS * state.of(element) if state.on_host else 0
    is_float = min(state.exp_avg, state.exp_avg_sq) == _FLOAT and (state.master == _FLOAT or element == _FLOAT)
    gradients = 0 if work.gradient_bytes == _FLOAT else _FLOAT
    return int(size * (slots + (0 if is_float else UPDATE_SCRATCH) + gradients))


def _kept_and_temporary(
    shape: ModelShape, stage: Stage, work: Workload, costs: dict[LayerSort, LayerCosts]
) -> tuple[int, int]:
    """Return (bytes that a micro-batch keeps on the stage, bytes that a layer needs temporarily)."""
    recomputed = Counter(shape.layer_sorts[layer] for layer in stage.recomputed(work))
    kept = temporary = 0.0
    for sort, count in stage.sorts(shape).items():
        cost = costs[sort]
        passes = max(cost.mlp_forward, cost.mlp_backward, cost.attention_backward - cost.mlp)
        again = 0
        if work.recompute == "full":
            # `uniform` keeps one input for each few layers, which are recomputed together.
            together = 1 if work.recompute_block else work.recompute_layers
            kept += recomputed[sort] * cost.input / together + (count - recomputed[sort]) * cost.saved
            again = together * cost.saved - cost.input
        elif work.recompute == "selective":
            parts = [cost.module_bytes(module, is_moe=sort.is_moe) for module in work.recompute_modules]
            kept += count * (cost.saved - sum(parts))
            again = max(parts)
        else:
            kept += count * cost.saved
        temporary = max(temporary, again + passes)
    return int(kept), int(temporary)


def micro_batches_in_flight(layout: ParallelLayout, work: Workload, stage: int) -> float:
    """Return how many forward passes wait for their backward pass on `stage`, in micro-batches of all its layers.

    Under 1F1B (https://arxiv.org/abs/2104.04473), this is the number of stages from here to the end. If stages are
    interleaved, the first backward pass comes after 2 (pp - stage - 1) + (vpp - 1) pp + 1 forward passes of
    one chunk, each 1 / vpp of the stage.
    """
    count = work.micro_batches(layout)
    if layout.vpp == 1:
        return min(layout.pp - stage, count)
    warm_up = 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * (work.micro_batch_group or layout.pp)
    return min(warm_up + 1, count * layout.vpp) / layout.vpp


def _buffers(layout: ParallelLayout, shape: ModelShape, work: Workload, stream: int, *, sees: bool) -> int:
    """Return the bytes of permanent buffers: gathered stream, pipeline receives, the step's tokens, workspaces.

    A stage that `sees` has the vision tower, if the model has one.
    """
    gathered = stream * layout.tp if layout.tp > 1 else 0
    received = 2 * stream if layout.pp > 1 else 0
    tower = tower_bytes(shape, work.tokens_per_micro_batch, work.element_bytes) if sees else 0
    return int(token_bytes(layout, shape, work) + gathered + received + LIBRARY_WORKSPACE) + tower


def token_bytes(layout: ParallelLayout, shape: ModelShape, work: Workload) -> float:
    """Return the bytes of a step's tokens on a rank: their ids, positions, rotations and fields."""
    tokens = work.tokens / (layout.dp * layout.cp)
    return tokens * (6 * _INDEX + 1 + 2 * work.element_bytes * shape.rotated_channels + _FLOAT * work.n_fields)


def _n_communicators(layout: ParallelLayout, shape: ModelShape) -> int:
    """Return how many NCCL communicators are created, each at its first call.

    A model without experts never calls their groups.
    """
    groups = [layout.tp, layout.cp, layout.dp * layout.cp, layout.pp]
    if shape.is_moe:
        groups += [layout.ep, layout.etp, layout.edp]
        if layout.ep > 1 and layout.etp > 1:
            groups.append(layout.ep * layout.etp)  # the numbers of rows per expert are exchanged over both
    return sum(size > 1 for size in groups)
