"""What would make a model fit on a cluster on which no layout does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fivefold.families.shape import ModelShape
from fivefold.layout.gpus import GPUS
from fivefold.planning.estimates import gb, largest
from fivefold.planning.layouts import SHORTEST_SHARD, layout_text, layouts
from fivefold.planning.problems import HEADROOM
from fivefold.planning.room import Cluster
from fivefold.planning.workload import Workload

MORE_GPUS = (2, 3, 4, 6, 8, 12, 16, 18, 24, 32, 36, 48, 64)
"""Multiples of the number of GPUs that are tried."""


def advice(shape: ModelShape, cluster: Cluster, work: Workload, reference: ModelShape | None) -> Iterator[str]:
    """Yield what comes nearest to fitting, and what would make it fit."""
    frugal = work.recomputing("full")
    needs = [
        (largest(cluster.memory(layout, shape, frugal, reference)), layout)
        for layout in layouts(shape, cluster, work, reference=reference)
    ]
    if not needs:
        yield (
            f"no layout of {cluster.n_gpus} GPUs suits the model's sizes: take a number of GPUs whose divisors divide "
            f"its {shape.n_layers} layers and {shape.n_kv_heads} key/value heads, or a smaller --gpus-per-node"
        )
        return
    nearest, layout = min(needs, key=lambda pair: pair[0].total)
    yield (
        f"the nearest is {layout_text(layout)} with full recomputation: stage {nearest.stage} needs "
        f"{gb(nearest.total)} GB ({gb(nearest.resident)} of it weights, gradients and optimizer), and a "
        f"{cluster.gpu.name} has {gb(cluster.gpu.memory * (1 - HEADROOM) - cluster.reserved)} GB to plan with"
    )
    yield from _remedies(shape, cluster, frugal, reference)
    if cluster.most_kept is not None:
        yield from _parting(shape, cluster, frugal, reference)


def _parting(shape: ModelShape, cluster: Cluster, work: Workload, reference: ModelShape | None) -> Iterator[str]:
    """Yield how many separate devices would hold a trainer that shares its devices."""
    yield f"while other roles work on the same GPUs, the trainer may keep {gb(max(cluster.most_kept or 0, 0))} GB there"
    apart = replace(cluster, reserved=0, engines=())
    for times in (1, *MORE_GPUS):
        if _fits(shape, apart.times(times), work, reference):
            yield f"with other devices for those roles, it fits on {cluster.n_gpus * times} GPUs of this kind"
            return


def _remedies(shape: ModelShape, cluster: Cluster, work: Workload, reference: ModelShape | None) -> Iterator[str]:
    if fitting := [gpu.name for gpu in GPUS.values() if _fits(shape, replace(cluster, gpu=gpu), work, reference)]:
        yield f"GPUs on which it fits: {', '.join(fitting)}"
    for times in MORE_GPUS:
        if _fits(shape, cluster.times(times), work, reference):
            yield f"it fits on {cluster.n_gpus * times} GPUs of this kind"
            break
    smaller = replace(work, micro_tokens=work.sequence_length)
    if work.micro_tokens > work.sequence_length and _fits(shape, cluster, smaller, reference):
        yield f"it fits with micro-batches of one sequence ({work.sequence_length} tokens)"
    length = work.sequence_length // 2
    while length >= SHORTEST_SHARD:
        shorter = replace(work, sequence_length=length, micro_tokens=length)
        if _fits(shape, cluster, shorter, reference):
            yield f"it fits with sequences of {length} tokens, one a micro-batch"
            return
        length //= 2


def _fits(shape: ModelShape, cluster: Cluster, work: Workload, reference: ModelShape | None) -> bool:
    if cluster.most_kept is not None and cluster.most_kept < 0:
        return False
    return any(
        cluster.holds(cluster.memory(layout, shape, work, reference))
        for layout in layouts(shape, cluster, work, reference=reference)
    )
