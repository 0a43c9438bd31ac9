"""The best layouts of a model on a cluster: every layout that the model can take, those that fit, ranked by time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fivefold.layout.blueprint import HEADROOM, gb
from fivefold.layout.gpus import GPUS, Gpu
from fivefold.layout.memory import RankMemory, training_memory
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.plan_shape import PlanShape
from fivefold.layout.roles import RoleAllocation
from fivefold.layout.stages import plan_problems
from fivefold.layout.timing import StepTime, step_time
from fivefold.layout.workload import RECOMPUTE, Recompute, Workload

VIRTUAL_STAGES = (1, 2, 4)
SHORTEST_SHARD = 512
"""Tokens of a sequence on a context parallel rank, below which splitting it further is not considered."""
MORE_GPUS = (2, 3, 4, 6, 8, 12, 16)
"""How many times as many GPUs are tried, where nothing fits."""


@dataclass(frozen=True)
class Cluster:
    gpu: Gpu
    n_gpus: int
    gpus_per_node: int


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    layout: ParallelLayout
    recompute: Recompute
    binding: RankMemory
    time: StepTime

    @property
    def text(self) -> str:
        """As `actor.backend` writes it."""
        return layout_text(self.layout)


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    best: tuple[Candidate, ...]
    """Fastest first; of layouts that differ in v alone, the fastest."""
    n_tried: int
    n_fitting: int
    advice: tuple[str, ...]
    """Where nothing fits: what comes nearest, and what would make it fit."""


def layout_text(layout: ParallelLayout) -> str:
    """The allocation string of a training layout."""
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


def search(shape: PlanShape, cluster: Cluster, work: Workload, *, limit: int = 5, has_reference: bool = False) -> Found:
    """The `limit` fastest layouts of a trainer that fit with `HEADROOM` to spare."""
    best: dict[tuple[int, ...], Candidate] = {}
    n_tried = n_fitting = 0
    for layout in layouts(shape, cluster, work):
        n_tried += 1
        chosen = _least_recompute(shape, cluster, work, layout, has_reference)
        if chosen is None:
            continue
        n_fitting += 1
        recompute, binding = chosen
        time = step_time(layout, shape, work.recomputing(recompute), cluster.gpu, cluster.gpus_per_node)
        key = (layout.tp, layout.pp, layout.cp, layout.ep, layout.etp)
        if key not in best or time.total < best[key].time.total:
            best[key] = Candidate(layout, recompute, binding, time)
    ranked = sorted(
        best.values(), key=lambda candidate: (candidate.time.total, candidate.layout.pp, candidate.layout.tp)
    )
    advice = () if ranked else tuple(_advice(shape, cluster, work, has_reference))
    return Found(tuple(ranked[:limit]), n_tried, n_fitting, advice)


def layouts(shape: PlanShape, cluster: Cluster, work: Workload) -> Iterator[ParallelLayout]:
    """Every layout over all GPUs that the model can take; tensor parallel groups stay inside a node."""
    for tp, pp, cp in _dense_degrees(shape, cluster, work):
        ranks = cluster.n_gpus // pp
        dp = ranks // (tp * cp)
        for ep, etp in _expert_degrees(shape, ranks, tp):
            for vpp in VIRTUAL_STAGES if pp > 1 else (1,):
                layout = ParallelLayout("megatron", tp, pp, cp, dp, vpp, ep, etp, ranks // (ep * etp))
                if _is_possible(layout, shape):
                    yield layout


def _dense_degrees(shape: PlanShape, cluster: Cluster, work: Workload) -> Iterator[tuple[int, int, int]]:
    n_gpus = cluster.n_gpus
    for tp in _divisors(n_gpus):
        if cluster.gpus_per_node % tp or shape.n_heads % tp or shape.n_kv_heads % tp:
            continue
        for pp in _divisors(n_gpus // tp):
            if pp > shape.n_layers or (shape.is_trainable and shape.n_layers % pp):
                continue
            for cp in _divisors(n_gpus // (tp * pp)):
                dp = n_gpus // (tp * pp * cp)
                if dp <= work.sequences and (cp == 1 or work.sequence_length // cp >= SHORTEST_SHARD):
                    yield tp, pp, cp


def _expert_degrees(shape: PlanShape, ranks: int, tp: int) -> Iterator[tuple[int, int]]:
    if not shape.is_moe:
        # Dense layers only: the expert grid is that of data parallelism.
        yield 1, 1
        return
    for etp in {1, tp}:
        for ep in _divisors(ranks // etp):
            if shape.n_experts % ep == 0:
                yield ep, etp


def _is_possible(layout: ParallelLayout, shape: PlanShape) -> bool:
    if not shape.is_trainable and layout.vpp > 1:
        return False
    return next(plan_problems(layout, shape), None) is None


def _divisors(number: int) -> list[int]:
    return [degree for degree in range(1, number + 1) if number % degree == 0]


def _least_recompute(
    shape: PlanShape, cluster: Cluster, work: Workload, layout: ParallelLayout, has_reference: bool
) -> tuple[Recompute, RankMemory] | None:
    """The recompute mode with the least work that fits, and the stage that needs the most under it."""
    room = cluster.gpu.memory * (1 - HEADROOM)
    for recompute in RECOMPUTE:
        binding = _binding(shape, work.recomputing(recompute), layout, has_reference)
        if binding.total <= room:
            return recompute, binding
        if binding.resident > room:
            return None
    return None


def _binding(shape: PlanShape, work: Workload, layout: ParallelLayout, has_reference: bool) -> RankMemory:
    return max(training_memory(layout, shape, work, has_reference=has_reference), key=lambda stage: stage.total)


def reasons(candidate: Candidate, first: Candidate, gpu: Gpu) -> tuple[str, ...]:
    """Why a candidate stands where it does: what it has for it, and what costs it the first place."""
    return (*_merits(candidate, gpu), *([] if candidate is first else _drawbacks(candidate, first)))


def _merits(candidate: Candidate, gpu: Gpu) -> Iterator[str]:
    left = gpu.memory - candidate.binding.total
    how = "no recomputation" if candidate.recompute == "none" else f"{candidate.recompute} recomputation"
    yield f"{how}, {gb(left)} GB to spare"
    if candidate.layout.pp > 1:
        yield f"{candidate.time.bubble_share:.0%} bubble"
    crossing = [
        item.dimension
        for item in candidate.time.traffic
        if item.crosses_nodes and item.dimension in ("cp", "ep", "etp")
    ]
    if crossing:
        yield f"{' and '.join(crossing)} cross nodes"
    elif inside := [item.dimension for item in candidate.time.traffic if item.dimension in ("tp", "cp", "ep", "etp")]:
        yield f"{' and '.join(inside)} inside nodes"


def _drawbacks(candidate: Candidate, first: Candidate) -> Iterator[str]:
    """The part of the step that loses the most time to the first candidate."""
    names = {
        "layers": "in the layers",
        "head": "in the LM head, which the last stage does alone",
        "recompute": "in recomputation",
        "launching": "waiting for the host",
        "exposed": "in tp, cp and ep traffic",
        "bubble": "in the pipeline's bubble",
        "data_parallel": "reducing gradients",
        "optimizer": "in the optimizer",
    }
    losses = {part: getattr(candidate.time, part) - getattr(first.time, part) for part in names}
    part = max(losses, key=lambda name: losses[name])
    if losses[part] > 0.005 * first.time.total:
        yield f"loses {losses[part]:.2f} s {names[part]}"


def _advice(shape: PlanShape, cluster: Cluster, work: Workload, has_reference: bool) -> Iterator[str]:
    frugal = work.recomputing("full")
    needs = [(_binding(shape, frugal, layout, has_reference), layout) for layout in layouts(shape, cluster, work)]
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
        f"{cluster.gpu.name} has {gb(cluster.gpu.memory * (1 - HEADROOM))} GB to plan with"
    )
    yield from _remedies(shape, cluster, frugal, has_reference)


def _remedies(shape: PlanShape, cluster: Cluster, work: Workload, has_reference: bool) -> Iterator[str]:
    if fitting := [gpu.name for gpu in GPUS.values() if _fits(shape, replace(cluster, gpu=gpu), work, has_reference)]:
        yield f"GPUs on which it fits: {', '.join(fitting)}"
    for times in MORE_GPUS:
        if _fits(shape, replace(cluster, n_gpus=cluster.n_gpus * times), work, has_reference):
            yield f"it fits on {cluster.n_gpus * times} GPUs of this kind"
            break
    smaller = replace(work, micro_tokens=work.sequence_length)
    if work.micro_tokens > work.sequence_length and _fits(shape, cluster, smaller, has_reference):
        yield f"it fits with micro-batches of one sequence ({work.sequence_length} tokens)"
    length = work.sequence_length // 2
    while length >= SHORTEST_SHARD:
        shorter = replace(work, sequence_length=length, micro_tokens=length)
        if _fits(shape, cluster, shorter, has_reference):
            yield f"it fits with sequences of {length} tokens, one a micro-batch"
            return
        length //= 2


def _fits(shape: PlanShape, cluster: Cluster, work: Workload, has_reference: bool) -> bool:
    room = cluster.gpu.memory * (1 - HEADROOM)
    return any(_binding(shape, work, layout, has_reference).total <= room for layout in layouts(shape, cluster, work))
