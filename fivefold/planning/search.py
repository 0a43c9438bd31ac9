"""The best layouts of a model on a cluster: all that the model can take, then the fitting ones, ranked by time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.families.shape import ModelShape
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.placement import RolePlacement
from fivefold.planning.advice import advice
from fivefold.planning.estimates import gb, largest
from fivefold.planning.groups import ranks_together
from fivefold.planning.layouts import layout_text, layouts
from fivefold.planning.memory import RankMemory
from fivefold.planning.model_estimate import recompute_modes
from fivefold.planning.room import Cluster
from fivefold.planning.timing import StepTime, step_time
from fivefold.planning.workload import Recompute, Workload

MOST_RANKED = 300
"""Most layouts of a ranking."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    layout: ParallelLayout
    recompute: Recompute
    binding: RankMemory
    spare: float
    """Bytes that are left on a GPU of the largest stage."""
    time: StepTime

    @property
    def text(self) -> str:
        """The layout as `actor.backend` writes it."""
        return layout_text(self.layout)


@dataclass(frozen=True)
class Found:
    """The outcome of a search."""

    best: tuple[Candidate, ...]
    """The fastest layouts, fastest first. Layouts that differ only in v are listed once."""
    n_tried: int
    n_fitting: int
    advice: tuple[str, ...]
    """What comes nearest to fitting and what would make it fit, if nothing does."""
    ranked: tuple[Candidate, ...] = ()
    """The fastest layouts as in `best`, but up to `MOST_RANKED` of them."""


def search(
    shape: ModelShape, cluster: Cluster, work: Workload, *, limit: int = 5, reference: ModelShape | None = None
) -> Found:
    """Return the `limit` fastest layouts of a trainer that fit with `HEADROOM` to spare."""
    best: dict[tuple[int, ...], Candidate] = {}
    n_tried = n_fitting = 0
    for layout in layouts(shape, cluster, work, reference=reference):
        n_tried += 1
        chosen = _least_recompute(shape, cluster, work, layout, reference)
        if chosen is None:
            continue
        n_fitting += 1
        recompute, binding = chosen
        time = _time(layout, shape, cluster, work.recomputing(recompute))
        key = (layout.tp, layout.pp, layout.cp, layout.ep, layout.etp)
        if key not in best or time.total < best[key].time.total:
            spare = cluster.gpu.memory - cluster.reserved - binding.total
            best[key] = Candidate(layout, recompute, binding, spare, time)
    ranked = sorted(
        best.values(), key=lambda candidate: (candidate.time.total, candidate.layout.pp, candidate.layout.tp)
    )
    remedies = () if ranked else tuple(advice(shape, cluster, work, reference))
    return Found(tuple(ranked[:limit]), n_tried, n_fitting, remedies, tuple(ranked[:MOST_RANKED]))


def _time(layout: ParallelLayout, shape: ModelShape, cluster: Cluster, work: Workload) -> StepTime:
    placed = RolePlacement("actor", layout, cluster.devices)
    return step_time(layout, shape, work, cluster.gpu, ranks_together(placed, is_moe=shape.is_moe))


def _least_recompute(
    shape: ModelShape, cluster: Cluster, work: Workload, layout: ParallelLayout, reference: ModelShape | None
) -> tuple[Recompute, RankMemory] | None:
    """Return the fitting recompute mode with the least work and its largest stage; None if no mode fits."""
    for recompute in recompute_modes(layout):
        memory = cluster.memory(layout, shape, work.recomputing(recompute), reference)
        if cluster.holds(memory):
            return recompute, largest(memory)
    return None


def reasons(candidate: Candidate, first: Candidate) -> tuple[str, ...]:
    """Return why a candidate has its rank: its merits, and what makes it slower than the first."""
    return (*_merits(candidate), *([] if candidate is first else _drawbacks(candidate, first)))


def _merits(candidate: Candidate) -> Iterator[str]:
    how = "no recomputation" if candidate.recompute == "none" else f"{candidate.recompute} recomputation"
    yield f"{how}, {gb(candidate.spare)} GB to spare"
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
    """Yield the part of the step that loses the most time against the first candidate."""
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
