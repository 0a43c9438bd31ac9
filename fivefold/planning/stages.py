"""What each pipeline stage holds: its layers, embedding and head, and the parameters of one of its ranks."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.families.shape import ModelShape
from fivefold.layout.grid import stage_layers
from fivefold.layout.parallel import ParallelLayout
from fivefold.planning.workload import Workload


@dataclass(frozen=True)
class Stage:
    """One pipeline stage. All of its ranks hold equal amounts."""

    index: int
    chunks: tuple[range, ...]
    """Layer numbers of each of its virtual stages."""
    n_moe: int
    """Layers that have experts."""
    has_embedding: bool
    has_head: bool
    """Whether it has the final norm and the output layer."""

    @property
    def n_layers(self) -> int:
        """Layers of all its virtual stages."""
        return sum(len(chunk) for chunk in self.chunks)

    def recomputed(self, work: Workload) -> list[int]:
        """Return the layers that `full` recomputes: all, or (`block`) the first ones of each virtual stage."""
        most = work.recompute_layers if work.recompute_block else None
        return [layer for chunk in self.chunks for layer in chunk[:most]]

    @property
    def spans(self) -> tuple[str, ...]:
        """Layers of each virtual stage, such as `0-3` and `8-11`."""
        return tuple(_span(chunk) for chunk in self.chunks)

    @property
    def summary(self) -> str:
        """Its layers as a text, such as `0-3, 8-11`; of many virtual stages, only the first two."""
        if len(self.spans) <= 3:
            return ", ".join(self.spans)
        return f"{', '.join(self.spans[:2])}, ... ({len(self.spans)} parts)"


def _span(chunk: range) -> str:
    if not chunk:
        return "none"
    return f"{chunk[0]}-{chunk[-1]}" if len(chunk) > 1 else f"{chunk[0]}"


@dataclass(frozen=True)
class RankParameters:
    """Parameters of one rank, by the ranks over which their optimizer states are sharded."""

    dense: int
    """Attention, dense MLPs, routers, norms and embeddings, which are replicated over dp * cp ranks."""
    experts: int
    """Routed experts, which are replicated over edp ranks."""

    @property
    def total(self) -> int:
        """Parameters of either kind."""
        return self.dense + self.experts


def stages(layout: ParallelLayout, shape: ModelShape) -> tuple[Stage, ...]:
    """Return the stages of the pipeline, first to last."""
    return tuple(_stage(layout, shape, index) for index in range(layout.pp))


def _stage(layout: ParallelLayout, shape: ModelShape, index: int) -> Stage:
    chunks = stage_layers(layout, shape.n_layers, index)
    return Stage(
        index=index,
        chunks=chunks,
        n_moe=sum(shape.moe_layers[layer] for chunk in chunks for layer in chunk),
        has_embedding=index == 0,
        has_head=index == layout.pp - 1,
    )


def rank_parameters(layout: ParallelLayout, shape: ModelShape, stage: Stage) -> RankParameters:
    """Return the parameters of one rank of `stage`. The vocabulary is padded to a multiple of tp."""
    tp = layout.tp
    n_dense = stage.n_layers - stage.n_moe
    dense = stage.n_layers * (shape.split_attention_parameters // tp + shape.whole_attention_parameters)
    dense += stage.n_layers * 2 * shape.hidden
    dense += n_dense * shape.dense_mlp_parameters // tp
    dense += stage.n_moe * (shape.router_parameters + shape.shared_expert_parameters // tp)
    vocabulary = -(-shape.vocab // tp) * shape.hidden
    # A tied matrix is on both ends of a pipeline, but only once if the ends are the same stage.
    matrices = stage.has_embedding + (stage.has_head and not shape.value_head)
    if shape.tied_embeddings:
        matrices = min(matrices, 1)
    dense += matrices * vocabulary
    if stage.has_head:
        dense += shape.hidden + (shape.hidden + shape.output_biases if shape.value_head else 0)
    local_experts = shape.n_experts // layout.ep if stage.n_moe else 0
    experts = stage.n_moe * local_experts * shape.expert_parameters // layout.etp
    return RankParameters(dense=dense, experts=experts)
