"""Bytes that a rank sends in a step, by dimension of parallelism, and the links that carry them.

    tp    all-gather and reduce-scatter of the residual stream around attention and around dense MLPs (sequence
          parallelism, https://arxiv.org/abs/2205.05198): both forward, both backward, and one more all-gather for the
          weights' gradients
    cp    all-gather of keys and values, or of the latents behind them, reduce-scatter of their gradients
    ep    all-to-all of tokens, once to each rank with some of their experts, there and back, forward and backward; with
          etp, each rank sends all etp ranks' tokens
    etp   all-gather and reduce-scatter of tokens; every rank then routes all of them
    pp    one residual stream per micro-batch and boundary, each way
    dp    once a step: reduce-scatter of gradients, all-gather of weights; the experts' over edp. On FSDP, in each
          micro-batch: all-gather of weights before either pass, reduce-scatter of gradients in float32

Each of a group of n ranks sends (n - 1) / n of the gathered bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fivefold.families.shape import ModelShape
from fivefold.layout.gpus import Gpu
from fivefold.layout.parallel import ParallelLayout
from fivefold.planning.stages import Stage, rank_parameters, trained_rank_parameters
from fivefold.planning.workload import Workload

Dimension = Literal["tp", "cp", "ep", "etp", "pp", "dp", "edp"]

_FLOAT = 4
LINK_EFFICIENCY = 0.75
"""Share of a link's bandwidth that NCCL's large collectives reach."""


@dataclass(frozen=True)
class Traffic:
    """What one rank of a stage sends in a step along one dimension."""

    dimension: Dimension
    size: int
    """Ranks of a group."""
    ranks_per_node: int
    """Ranks of a group on one node."""
    bytes: float
    """Sent by one rank in a step."""
    exchanges_pairs: bool
    """Whether ranks send to each other directly (all-to-all, point to point), each over its own network card.

    Otherwise the traffic runs in a ring over the network cards of all ranks.
    """

    @property
    def crosses_nodes(self) -> bool:
        """Whether ranks of a group are on several nodes."""
        return self.ranks_per_node < self.size

    def seconds(self, gpu: Gpu) -> float:
        """Return the seconds on the slowest link if nothing else uses it."""
        if not self.crosses_nodes:
            return self.bytes / (gpu.link * LINK_EFFICIENCY)
        if self.exchanges_pairs:
            share = (self.size - self.ranks_per_node) / (self.size - 1)
            between, within = self.bytes * share / gpu.network, self.bytes * (1 - share) / gpu.link
            return max(between, within) / LINK_EFFICIENCY
        return self.bytes / (min(gpu.link, gpu.network * self.ranks_per_node) * LINK_EFFICIENCY)


def step_traffic(
    layout: ParallelLayout,
    shape: ModelShape,
    work: Workload,
    stage: Stage,
    together: Mapping[Dimension, int],
) -> tuple[Traffic, ...]:
    """Return the traffic of one rank of `stage`, for the dimensions that have any.

    `together` is the number of ranks of a group on one node, from `groups.ranks_together`.
    """
    sizes: dict[Dimension, int] = {
        "tp": layout.tp,
        "cp": layout.cp,
        "ep": layout.ep,
        "etp": layout.etp,
        "pp": layout.pp,
        # Gradients of attention are reduced over the data and context parallel ranks together.
        "dp": layout.dp * layout.cp,
        "edp": layout.edp,
    }
    moved = _bytes(layout, shape, work, stage)
    return tuple(
        Traffic(
            dimension=dimension,
            size=size,
            ranks_per_node=together[dimension],
            bytes=moved[dimension],
            exchanges_pairs=dimension in ("ep", "pp"),
        )
        for dimension, size in sizes.items()
        if size > 1 and moved[dimension] > 0
    )


def _bytes(layout: ParallelLayout, shape: ModelShape, work: Workload, stage: Stage) -> dict[Dimension, float]:
    element, tp = work.element_bytes, layout.tp
    tokens = work.tokens / (layout.dp * layout.cp)
    stream = tokens * shape.hidden * element
    n_dense = stage.n_layers - stage.n_moe
    again = repeated_halves(stage, work)
    # The forward pass communicates the stream twice, the backward pass three times, and recomputation twice again.
    mlps = 5 + 2 * again[1]
    is_fsdp = layout.backend == "fsdp"
    # The input is gathered once, and again for the weights' gradients; its gradient is scattered. The rest is output.
    attention = (3 + again[0]) * (1.0 if is_fsdp else _gathered(shape)) + 2 + again[0]
    # FSDP's tensor parallelism also sums the stream after the experts; Megatron-Core has etp for that.
    shared = stage.n_moe if is_fsdp or shape.shared_expert_ffn_hidden else 0
    passes = stage.n_layers * attention + (n_dense + shared) * mlps
    passes += 2 * stage.has_embedding + 2 * stage.has_head
    keys = element * tokens * layout.cp * (shape.key_width + shape.value_width) / tp
    if shape.latent is not None:
        keys = element * tokens * layout.cp * shape.latent.shared_dim
    exchanged_heads = 0 if shape.delta is None else shape.delta.input_width + shape.delta.value_width
    heads = element * tokens * exchanged_heads / tp
    n_delta = sum(count for sort, count in stage.sorts(shape).items() if sort.is_delta)
    mixers = keys * (stage.n_layers - n_delta) + heads * n_delta
    gathered = stream / tp * (1 if is_fsdp else layout.etp)
    parameters = (rank_parameters if is_fsdp else trained_rank_parameters)(layout, shape, stage)
    boundaries = (not stage.has_embedding) + (not stage.has_head) + 2 * (layout.vpp - 1)
    exchanged: float = work.gradient_bytes + element
    if is_fsdp:
        exchanged = work.micro_batches(layout) * ((1 if work.kept_gathered == 1 else 2) * element + _FLOAT)
    return {
        "tp": _share(tp) * stream * passes,
        "cp": _share(layout.cp) * mixers * (2 + again[0]),
        "ep": _journeys(shape, layout.ep) * gathered * stage.n_moe * (4 + 2 * again[1]),
        "etp": 0.0 if is_fsdp else _share(layout.etp) * gathered * stage.n_moe * (4 + 2 * again[1]),
        "pp": stream / tp * boundaries if layout.pp > 1 else 0.0,
        "dp": _share(layout.dp * layout.cp) * parameters.dense * exchanged,
        "edp": _share(layout.edp) * parameters.experts * exchanged,
    }


def _gathered(shape: ModelShape) -> float:
    """Return the channels that attention gathers over the stream's channels. With MLA, latents are gathered."""
    if (latent := shape.latent) is None:
        return 1.0
    return ((latent.query_rank or shape.hidden) + latent.shared_dim) / shape.hidden


def repeated_halves(stage: Stage, work: Workload) -> tuple[float, float]:
    """Return how often the forward pass of a layer is recomputed, collectives included: (attention, MLP)."""
    if work.recompute == "full":
        share = len(stage.recomputed(work)) / stage.n_layers
        return share, share
    repeats_mlp = work.recompute == "selective" and bool({"mlp", "moe"} & set(work.recompute_modules))
    return 0.0, float(repeats_mlp)


def _journeys(shape: ModelShape, ep: int) -> float:
    """Return to how many other ranks a token travels in the mean, if every choice of experts is as likely."""
    elsewhere = math.comb(shape.n_experts - shape.n_experts // ep, shape.top_k)
    return (ep - 1) * (1 - elsewhere / math.comb(shape.n_experts, shape.top_k))


def _share(size: int) -> float:
    return (size - 1) / size
