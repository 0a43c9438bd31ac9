"""The time of an optimizer step, from a few constants that can be checked.

    GPU time of a micro-batch   = matmuls / (peak * efficiency) + element-wise bytes / (bandwidth * efficiency)
                                + traffic of tp, cp, ep (nothing overlaps it) + waits for the host
    step                        = (micro-batches + (pp - 1) / vpp) * the slowest stage's
                                + optimizer + weights' all-gather + what the last backward pass does not hide of dp

PyTorch's kernels reach these efficiencies on an H200 with 8,192-token micro-batches of Qwen3-30B-A3B's shape. The
estimate is the best that these kernels allow. Waiting, uneven experts and uneven sequences cost a part of it, so the
expected range begins at `SLACK` of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fivefold.families.backward import over_forward, with_backward
from fivefold.families.flops import ForwardFlops, PartFlops
from fivefold.families.recomputation import keys_of_latents, keys_of_others
from fivefold.families.shape import ModelShape
from fivefold.layout.backends import BACKENDS
from fivefold.layout.gpus import Gpu
from fivefold.layout.parallel import ParallelLayout
from fivefold.planning.activations import layer_costs
from fivefold.planning.stages import Stage, stages, trained_rank_parameters
from fivefold.planning.traffic import Dimension, Traffic, repeated_halves, step_traffic
from fivefold.planning.workload import Workload

DENSE_EFFICIENCY = 0.70
"""Share of the peak that dense matmuls reach."""
GROUPED_EFFICIENCY = 0.54
"""Share of the peak that the experts' grouped matmuls reach."""
ATTENTION_EFFICIENCY: Mapping[str, tuple[float, float]] = {
    "flash_attention_2": (0.31, 0.21),
    "flash_attention_4": (0.43, 0.41),
}
"""Shares of the peak that the forward and the backward pass of attention reach. The backward pass counts twice the
forward FLOPs, although flash attention also recomputes the scores."""
BANDWIDTH_EFFICIENCY = 0.65
"""Share of the memory's bandwidth that element-wise kernels reach."""
PASSES_OVER_SAVED = 8
"""Times that element-wise kernels read or write each saved byte or its gradient, forward and backward."""
OPTIMIZER_BYTES = 34
"""Bytes read and written per parameter of the shard: gradient norm, AdamW, the bfloat16 copy."""
HOST_LINK = 55e9
"""Bytes/s between pinned host memory and a GPU in either direction, measured on an H200."""
ACCUMULATION_BYTES = 12
"""Bytes read and written per grouped weight in a micro-batch: its gradient, and its sum in float32."""
PLAIN_LAYERS = 1.4
"""Time of transformers' layers, with separate kernels for norms, rotation and activation, over fused ones."""
LAUNCH_SECONDS = 0.003
"""Seconds of Python and CUDA launches per layer and micro-batch, forward and backward."""
EXCHANGE_SECONDS = 0.003
"""Seconds that an MoE layer waits per micro-batch with ep > 1 until the host knows how many rows arrive."""
SLACK = 0.7
"""Least share of the estimated MFU that real steps reach."""

_COLLECTIVES_IN_THE_WAY = ("tp", "cp", "ep", "etp")


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, as kernels and links allow."""

    layers: float
    """Matmuls and element-wise kernels of the slowest stage, all micro-batches."""
    head: float
    """LM head and log-probs on the last stage."""
    recompute: float
    """Recomputed forward passes."""
    launching: float
    """Waits of the GPU for Python to launch kernels, or to learn how many rows an exchange brings."""
    exposed: float
    """Traffic of tp, cp and ep that nothing hides."""
    bubble: float
    """Waits for the pipeline to fill and to drain."""
    data_parallel: float
    """Traffic of gradients and weights between data-parallel ranks that the backward pass does not hide."""
    optimizer: float
    micro_batches: int
    flops: PartFlops
    """FLOPs of the whole step, over all ranks."""
    traffic: tuple[Traffic, ...]
    """Traffic of a rank of the slowest stage."""
    mfu: float
    """Model FLOP/s utilisation of the estimate."""
    tokens_per_second: float
    """Tokens per second and GPU of the estimate."""

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.in_pipeline + self.bubble + self.data_parallel + self.optimizer

    @property
    def in_pipeline(self) -> float:
        """Seconds of all micro-batches without the bubble."""
        return self.layers + self.head + self.recompute + self.launching + self.exposed

    @property
    def bubble_share(self) -> float:
        """Share of the step that waits for the pipeline."""
        return self.bubble / self.total

    @property
    def mfu_range(self) -> tuple[float, float]:
        """Lowest and highest MFU to expect from a measurement."""
        return SLACK * self.mfu, self.mfu


def step_time(
    layout: ParallelLayout,
    shape: ModelShape,
    work: Workload,
    gpu: Gpu,
    together: Mapping[Dimension, int],
) -> StepTime:
    """Return the time of one optimizer step: forward, backward and update. `together` is as in `step_traffic`."""
    timed = []
    for stage in _distinct(layout, shape):
        sent = step_traffic(layout, shape, work, stage, together)
        timed.append((_StageTime.of(layout, shape, work, stage, gpu, sent), stage, sent))
    slowest, stage, traffic = max(timed, key=lambda entry: entry[0].total)
    count = work.micro_batches(layout)
    data_parallel = sum(item.seconds(gpu) for item in traffic if item.dimension in ("dp", "edp"))
    # Each parameter sends `gradient_bytes` of gradient and `element_bytes` of weight. Gradients are reduced during the
    # backward pass of the last micro-batch.
    gradients = data_parallel * work.gradient_bytes / (work.gradient_bytes + work.element_bytes)
    hidden = min(gradients, slowest.layers * 2 / 3)
    if layout.backend == "fsdp":
        # While a layer computes, the next layer's weights are gathered and the last one's gradients reduced.
        hidden = min(data_parallel, slowest.layers * count)
    parameters = trained_rank_parameters(layout, shape, stage)
    sharded = parameters.dense / (layout.dp * layout.cp) + parameters.experts / layout.edp
    forward = ForwardFlops.of(shape).on_equal(work.trained_sequences, work.sequence_length)
    flops = with_backward(shape, forward)
    parts = {
        "layers": slowest.layers * count,
        "head": slowest.head * count,
        "recompute": slowest.recompute * count,
        "launching": slowest.launching * count,
        "exposed": slowest.exposed * count,
        "bubble": slowest.total * (layout.pp - 1) / layout.vpp,
        "data_parallel": data_parallel - hidden,
        "optimizer": sharded * _optimizer_seconds(layout, work, gpu),
    }
    total = sum(parts.values())
    return StepTime(
        **parts,
        micro_batches=count,
        flops=flops,
        traffic=traffic,
        mfu=flops.total / total / layout.world_size / gpu.peak,
        tokens_per_second=work.tokens / total / layout.world_size,
    )


def _optimizer_seconds(layout: ParallelLayout, work: Workload, gpu: Gpu) -> float:
    """Return the seconds of the update per parameter. State on the host moves in both directions at the same time."""
    on_device = OPTIMIZER_BYTES / (gpu.bandwidth * BANDWIDTH_EFFICIENCY)
    # FSDP's master weights are its shards, which stay on the GPU.
    streamed = work.state.of(4 if layout.backend == "fsdp" else work.element_bytes)
    return max(on_device, streamed / HOST_LINK) if work.state.on_host else on_device


def _distinct(layout: ParallelLayout, shape: ModelShape) -> list[Stage]:
    """Return the stages that may differ in time: the ends, and one of each composition in between."""
    every = stages(layout, shape)
    middle = {frozenset(stage.sorts(shape).items()): stage for stage in every[1:-1]}
    return list({stage.index: stage for stage in (every[0], every[-1], *middle.values())}.values())


@dataclass(frozen=True)
class _StageTime:
    """Seconds of one micro-batch, forward and backward, on one rank of a stage."""

    layers: float
    head: float
    recompute: float
    launching: float
    exposed: float

    @property
    def total(self) -> float:
        return self.layers + self.head + self.recompute + self.launching + self.exposed

    @staticmethod
    def of(
        layout: ParallelLayout,
        shape: ModelShape,
        work: Workload,
        stage: Stage,
        gpu: Gpu,
        traffic: tuple[Traffic, ...],
    ) -> _StageTime:
        count = work.micro_batches(layout)
        # The mean micro-batch counts here; the fullest one decides the memory.
        sequences = work.trained_sequences / layout.dp / count
        whole = ForwardFlops.of(shape).on_equal(sequences, work.sequence_length)
        forward = whole.scaled(1 / (layout.tp * layout.cp))
        fill = sequences * work.sequence_length / work.tokens_per_micro_batch
        layers, again = _layer_seconds(layout, shape, work, stage, gpu, forward, fill)
        if layout.backend == "fsdp":
            layers, again = PLAIN_LAYERS * layers, PLAIN_LAYERS * again
        products = over_forward(shape).head + work.logprob_recompute
        head = products * forward.head / DENSE_EFFICIENCY / gpu.peak if stage.has_head else 0.0
        exposed = sum(item.seconds(gpu) / count for item in traffic if item.dimension in _COLLECTIVES_IN_THE_WAY)
        repeated, _ = repeated_halves(stage, work)
        launch = LAUNCH_SECONDS * stage.n_layers * (1 + repeated / 3)
        launching = max(0.0, launch - layers - again - exposed)
        if BACKENDS[layout.backend].folds_experts and layout.ep > 1:
            launching += EXCHANGE_SECONDS * stage.n_moe
        return _StageTime(layers=layers, head=head, recompute=again, launching=launching, exposed=exposed)


def _layer_seconds(
    layout: ParallelLayout,
    shape: ModelShape,
    work: Workload,
    stage: Stage,
    gpu: Gpu,
    forward: PartFlops,
    fill: float,
) -> tuple[float, float]:
    """Return the seconds of a stage's layers for one micro-batch that is filled to the share `fill`.

    They are (forward and backward, recomputation).
    """
    mixers, attends = shape.mixer_shares(stage.layers)
    moe_share = stage.n_moe / shape.n_moe_layers if shape.n_moe_layers else 0.0
    products = PartFlops(
        projections=forward.projections * mixers * (1 + keys_of_others(shape, layout)) / DENSE_EFFICIENCY,
        attention=0.0,
        dense_mlps=forward.dense_mlps * _mlp_share(shape, stage) / DENSE_EFFICIENCY,
        experts=forward.experts * moe_share / GROUPED_EFFICIENCY,
        router=forward.router * moe_share / DENSE_EFFICIENCY,
        head=0.0,
    )
    matmuls, mlps = products.total, products.dense_mlps + products.experts
    attention = forward.attention * attends
    forward_efficiency, backward_efficiency = ATTENTION_EFFICIENCY[work.attn_impl]
    scores = attention / forward_efficiency
    saved, mlp_saved = _saved(layout, shape, work, stage)
    moved = PASSES_OVER_SAVED * saved * fill
    moved += ACCUMULATION_BYTES * trained_rank_parameters(layout, shape, stage).experts
    element_wise = gpu.bandwidth * BANDWIDTH_EFFICIENCY
    passes = over_forward(shape)
    computing = products.weighted(passes) + scores + (passes.attention - 1) * attention / backward_efficiency
    again_bytes = PASSES_OVER_SAVED / 3 * fill / element_wise
    attention_again, mlp_again = repeated_halves(stage, work)
    if work.recompute == "full":
        again = attention_again * ((matmuls + scores) / gpu.peak + saved * again_bytes)
    else:
        again = mlp_again * (mlps / gpu.peak + mlp_saved * again_bytes)
        if work.recompute == "selective" and "core_attn" in work.recompute_modules:
            again += (scores + forward.projections * mixers * keys_of_latents(shape, layout)) / gpu.peak
    return computing / gpu.peak + moved / element_wise, again


def _mlp_share(shape: ModelShape, stage: Stage) -> float:
    """Return the stage's share of the FLOPs of all dense MLPs and shared experts."""

    def weights(n_layers: int, n_moe: int) -> int:
        return (n_layers - n_moe) * shape.dense_mlp_parameters + n_moe * shape.shared_expert_parameters

    whole = weights(shape.n_layers, shape.n_moe_layers)
    return weights(stage.n_layers, stage.n_moe) / whole if whole else 0.0


def _saved(layout: ParallelLayout, shape: ModelShape, work: Workload, stage: Stage) -> tuple[int, int]:
    """Return the bytes that a micro-batch saves on the stage without recomputation: (all, MLPs only)."""
    saved = mlp = 0
    for sort, count in stage.sorts(shape).items():
        costs = layer_costs(shape, layout, work, **sort._asdict())
        saved += count * costs.saved
        mlp += count * costs.mlp
    return saved, mlp
