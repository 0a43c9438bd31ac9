"""What each pipeline stage holds: its layers, embedding and head, and the parameters of one of its ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from fivefold.families.shape import LayerSort, ModelShape
from fivefold.families.tensors import embedding, tensors, trained_tensors
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

    def sorts(self, shape: ModelShape) -> Counter[LayerSort]:
        """Return how many layers of each sort it has."""
        return Counter(shape.layer_sorts[layer] for layer in self.layers)

    @property
    def layers(self) -> list[int]:
        """Layer numbers of all its virtual stages."""
        return [layer for chunk in self.chunks for layer in chunk]

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


def trained_rank_parameters(layout: ParallelLayout, shape: ModelShape, stage: Stage) -> RankParameters:
    """Return the parameters of one rank of `stage` that are trained."""
    return rank_parameters(layout, shape, stage, only_trained=True)


def rank_parameters(
    layout: ParallelLayout, shape: ModelShape, stage: Stage, *, only_trained: bool = False
) -> RankParameters:
    """Return the parameters of one rank of `stage`. Rows of the vocabulary are padded to a multiple of tp."""
    counts = _counts(shape, layout.tp, layout.ep, layout.etp, only_trained)
    layers = [counts.layers[layer] for layer in stage.layers]
    # A tied matrix is on both ends of a pipeline, and only once where the ends are the same stage.
    has_table = stage.has_embedding or (stage.has_head and shape.tied_embeddings)
    ends = has_table * counts.embedding + stage.has_head * counts.head
    return RankParameters(
        dense=sum(layer.dense for layer in layers) + ends, experts=sum(layer.experts for layer in layers)
    )


@dataclass(frozen=True)
class _Counts:
    """Parameters on one rank."""

    layers: tuple[RankParameters, ...]
    embedding: int
    head: int
    """The last norm and the output layer or value head."""


@lru_cache(maxsize=256)
def _counts(shape: ModelShape, tp: int, ep: int, etp: int, only_trained: bool) -> _Counts:
    dense, experts, first, head = [0] * shape.n_layers, [0] * shape.n_layers, 0, 0
    trained = trained_tensors(shape)
    for tensor in tensors(shape):
        if only_trained and tensor.names[0] not in trained:
            continue
        if tensor.layer is None:
            first += (tensor.name == embedding(shape)) * tensor.elements(tp)
            head += (tensor.name != embedding(shape)) * tensor.elements(tp)
        elif tensor.n_experts is None:
            dense[tensor.layer] += tensor.elements(tp)
        else:
            experts[tensor.layer] += tensor.n_experts // ep * tensor.elements(etp)
    return _Counts(tuple(map(RankParameters, dense, experts)), first, head)
