"""All training layouts that models can take on a cluster."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.families.shape import ModelShape
from fivefold.layout.allocation import RoleAllocation
from fivefold.layout.backends import BACKENDS
from fivefold.layout.parallel import ParallelLayout
from fivefold.planning.room import Cluster
from fivefold.planning.workload import Workload
from fivefold.rules.layouts import layout_problems

VIRTUAL_STAGES = (1, 2, 4, 8)
SHORTEST_SHARD = 512
"""Fewest tokens of a sequence on a context parallel rank."""


def layouts(
    shape: ModelShape, cluster: Cluster, work: Workload, *, reference: ModelShape | None = None
) -> Iterator[ParallelLayout]:
    """Yield every layout over all GPUs that the models can take. Tensor parallel groups stay inside a node."""
    models = [shape] if reference is None else [shape, reference]
    for tp, pp, cp in _dense_degrees(shape, cluster, work):
        ranks = cluster.n_gpus // pp
        dp = ranks // (tp * cp)
        for ep, etp in _expert_degrees(shape, cluster.backend, ranks, tp):
            for vpp in VIRTUAL_STAGES if pp > 1 else (1,):
                layout = ParallelLayout(cluster.backend, tp, pp, cp, dp, vpp, ep, etp, ranks // (ep * etp))
                if all(_is_possible(layout, model) for model in models):
                    yield layout


def _dense_degrees(shape: ModelShape, cluster: Cluster, work: Workload) -> Iterator[tuple[int, int, int]]:
    n_gpus, has_stages = cluster.n_gpus, "p" in BACKENDS[cluster.backend].letters
    for tp in _divisors(n_gpus):
        if not cluster.splits(tp) or shape.n_heads % tp or shape.n_kv_heads % tp:
            continue
        for pp in _divisors(n_gpus // tp):
            if pp > shape.n_layers or (pp > 1 and not has_stages):
                continue
            for cp in _divisors(n_gpus // (tp * pp)):
                dp = n_gpus // (tp * pp * cp)
                if dp <= work.sequences and (cp == 1 or work.sequence_length // cp >= SHORTEST_SHARD):
                    yield tp, pp, cp


def _expert_degrees(shape: ModelShape, backend: str, ranks: int, tp: int) -> Iterator[tuple[int, int]]:
    if not shape.is_moe or not BACKENDS[backend].folds_experts:
        # Without experts to spread, the expert grid is expert data parallelism alone.
        yield 1, 1
        return
    for etp in {1, tp}:
        for ep in _divisors(ranks // etp):
            if shape.n_experts % ep == 0:
                yield ep, etp


def _is_possible(layout: ParallelLayout, shape: ModelShape) -> bool:
    return next(layout_problems(layout, shape), None) is None


def _divisors(number: int) -> list[int]:
    return [degree for degree in range(1, number + 1) if number % degree == 0]


def layout_text(layout: ParallelLayout) -> str:
    """Return the allocation string of a training layout."""
    return str(
        RoleAllocation(
            backend=layout.backend,
            dp=layout.dp,
            tp=layout.tp,
            pp=layout.pp,
            cp=layout.cp,
            vpp=layout.vpp,
            ep=layout.ep,
            etp=layout.etp,
        )
    )
