"""The best layouts of a model on a cluster: all that the model can take, then those that fit, ranked by time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fivefold.families.check import layout_problems
from fivefold.families.shape import ModelShape
from fivefold.layout.allocation import RoleAllocation
from fivefold.layout.backends import BACKENDS
from fivefold.layout.gpus import GPUS, Gpu
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.placement import Device, RolePlacement
from fivefold.planning.blueprint import HEADROOM, plan_alone
from fivefold.planning.groups import ranks_together
from fivefold.planning.memory import Kind, RankMemory
from fivefold.planning.question import Question
from fivefold.planning.role_plans import (
    RolloutPlan,
    gb,
    kept_bytes,
    largest,
    plan_rollout,
    recompute_modes,
    trainer_memory,
)
from fivefold.planning.rollout_memory import asleep_bytes
from fivefold.planning.sending import kept_while_sending, sending_bytes
from fivefold.planning.timing import StepTime, step_time
from fivefold.planning.workload import Recompute, Workload
from fivefold.weights.table import pick
from fivefold.weights.transport import Transport

VIRTUAL_STAGES = (1, 2, 4, 8)
SHORTEST_SHARD = 512
"""Fewest tokens of a sequence on a context parallel rank; shorter shards are not considered."""
MORE_GPUS = (2, 3, 4, 6, 8, 12, 16, 18, 24, 32, 36, 48, 64)
"""How many times as many GPUs are tried where nothing fits."""


@dataclass(frozen=True)
class Engine:
    """What an engine needs of each GPU while it generates and a trainer on the same GPUs waits."""

    share: float
    """Share of the GPU's memory that it and the roles that wait may fill."""
    least: int
    """Fewest bytes that it runs with: a server for one sequence, the embedded engine for a batch."""
    beside: int
    """Bytes that the other roles have there while it generates, the trainer excepted."""
    fraction: float | None = None
    """Share of the GPU's memory that a server takes whatever other roles keep; None where it takes what they leave."""
    weights: int = 0
    """Bytes of its weights."""

    @staticmethod
    def of(rollout: RolloutPlan, fraction: float | None) -> Engine:
        """Return the needs of a rollout, whose server takes `fraction` of the memory."""
        memory, layout = rollout.memory, rollout.placed.layout
        share = BACKENDS[layout.backend].memory_share
        least = memory.total - memory.kv_cache + memory.least_cache
        return Engine(share, least, rollout.beside, fraction if layout.is_server else None, memory.weights)

    def leaves(self, gpu: Gpu) -> int:
        """Return the bytes that a trainer may keep; below 0, the engine does not fit even without a trainer."""
        if self.fraction is None:
            return int(gpu.memory * self.share) - self.least - self.beside
        if gpu.memory * self.fraction < self.least:
            return -1
        return int(gpu.memory * (1 - self.fraction)) - self.beside


@dataclass(frozen=True)
class Cluster:
    """The GPUs of the trainer for which a layout is wanted."""

    gpu: Gpu
    devices: tuple[Device, ...]
    """The device of each rank."""
    reserved: int = 0
    """Bytes of each GPU that other roles keep while the trainer works."""
    engines: tuple[Engine, ...] = ()
    """Engines that generate on the same GPUs."""
    offloadable: tuple[Kind, ...] = ()
    """What the trainer may move off its GPUs while they generate."""
    transport: Transport | None = None
    """How its weights go to them; None: there are none."""
    backend: str = "megatron"
    """The trainer's engine, all layouts of which are tried."""
    reference_share: float = 1.0
    """Bytes of a weight of the reference on the trainer's GPUs, over those of a weight of the trainer."""

    @staticmethod
    def whole(gpu: Gpu, n_gpus: int, gpus_per_node: int) -> Cluster:
        """Return GPUs that no other role uses, from the first of a node on."""
        return Cluster(gpu, tuple(Device(*divmod(index, gpus_per_node)) for index in range(n_gpus)))

    @staticmethod
    def of(question: Question) -> Cluster:
        """Return the devices of the question's actor, and what the roles that share them leave it.

        Raises:
            ValueError: roles that do not fit on the cluster or on their lists.
        """
        placement = question.place()
        sharers = [placement[role] for role in placement.sharers("actor")]
        rollouts = [placed for placed in sharers if not placed.layout.is_training]
        trainers = [plan_alone(question, placement, placed) for placed in sharers if placed.layout.is_training]
        reserved = sum(asleep_bytes(placed.layout) for placed in rollouts)
        kept = {each.placed.role: kept_bytes(each, each.offloaded) for each in trainers}
        # A reward model works while the rollout is awake.
        awake = kept | {each.placed.role: each.binding.total for each in trainers if each.placed.role == "reward"}
        engines = tuple(
            Engine.of(plan_rollout(question, placed, sum(awake.values())), question.memory_fraction)
            for placed in rollouts
        )
        actor = placement["actor"]
        offloadable, backend = question.offload.possible, actor.layout.backend
        transport = pick(question.weight_transport, placement) if engines else None
        reserved += sum(kept.values())
        share = (question.reference_bytes or question.work.element_bytes) / question.work.element_bytes
        share = 0.0 if question.reference_is_offloaded else share
        return Cluster(question.gpu, actor.devices, reserved, engines, offloadable, transport, backend, share)

    @property
    def n_gpus(self) -> int:
        """GPUs of the trainer."""
        return len(self.devices)

    @property
    def most_kept(self) -> int | None:
        """Bytes that the trainer may keep while other roles work on the same GPUs; None where no role does.

        Below 0, the others do not fit even without the trainer.
        """
        return min((engine.leaves(self.gpu) for engine in self.engines), default=None)

    def times(self, count: int) -> Cluster:
        """Return one cluster that is `count` times as large."""
        n_nodes = 1 + max(device.node for device in self.devices)
        copies = range(0, count * n_nodes, n_nodes)
        return replace(
            self, devices=tuple(Device(first + node, local) for first in copies for node, local in self.devices)
        )

    def splits(self, tp: int) -> bool:
        """Return whether tensor parallel groups of `tp` ranks stay inside a node."""
        nodes = [device.node for device in self.devices]
        return all(len(set(nodes[first : first + tp])) == 1 for first in range(0, self.n_gpus, tp))

    def holds(self, memory: Sequence[RankMemory]) -> bool:
        """Return whether a trainer with stages of such `memory` fits, with `HEADROOM` to spare."""
        room = self.gpu.memory * (1 - HEADROOM) - self.reserved
        return all(stage.total <= room and self._may_keep(stage) for stage in memory)

    def _may_keep(self, stage: RankMemory) -> bool:
        if self.most_kept is None:
            return True
        arriving = max(engine.weights for engine in self.engines) + kept_while_sending(stage, self.offloadable)
        return stage.kept(self.offloadable) <= self.most_kept and arriving + self.reserved <= self.gpu.memory

    def memory(
        self, layout: ParallelLayout, shape: ModelShape, work: Workload, reference: ModelShape | None
    ) -> Sequence[RankMemory]:
        """Return the memory of each pipeline stage of a trainer, the buckets for the engines on its GPUs included."""
        stages = trainer_memory(layout, shape, work, reference)
        stages = tuple(replace(stage, reference=int(stage.reference * self.reference_share)) for stage in stages)
        if not self.engines or self.transport is None:
            return stages
        element_bytes = work.element_bytes
        sending = sending_bytes(layout, shape, self.transport, element_bytes=element_bytes)
        return [replace(stage, sending=sending) for stage in stages]


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    layout: ParallelLayout
    recompute: Recompute
    binding: RankMemory
    spare: float
    """Bytes that are left on a GPU of the stage that needs the most."""
    time: StepTime

    @property
    def text(self) -> str:
        """The layout as `actor.backend` writes it."""
        return layout_text(self.layout)


MOST_RANKED = 300
"""Most layouts of a ranking."""


@dataclass(frozen=True)
class Found:
    """The outcome of a search."""

    best: tuple[Candidate, ...]
    """The fastest layouts, fastest first; of those that differ only in v, the fastest."""
    n_tried: int
    n_fitting: int
    advice: tuple[str, ...]
    """What comes nearest to fitting and what would make it fit, where nothing does."""
    ranked: tuple[Candidate, ...] = ()
    """The fastest layouts as in `best`, but up to `MOST_RANKED` of them."""


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
    advice = () if ranked else tuple(_advice(shape, cluster, work, reference))
    return Found(tuple(ranked[:limit]), n_tried, n_fitting, advice, tuple(ranked[:MOST_RANKED]))


def _time(layout: ParallelLayout, shape: ModelShape, cluster: Cluster, work: Workload) -> StepTime:
    placed = RolePlacement("actor", layout, cluster.devices)
    return step_time(layout, shape, work, cluster.gpu, ranks_together(placed, is_moe=shape.is_moe))


def layouts(
    shape: ModelShape, cluster: Cluster, work: Workload, *, reference: ModelShape | None = None
) -> Iterator[ParallelLayout]:
    """Yield every layout over all GPUs that the models can take; tensor parallel groups stay inside a node."""
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
        # Without experts to spread, expert data parallelism is all that is left of the expert grid.
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


def _least_recompute(
    shape: ModelShape, cluster: Cluster, work: Workload, layout: ParallelLayout, reference: ModelShape | None
) -> tuple[Recompute, RankMemory] | None:
    """Return the fitting recompute mode with the least work, and the stage that needs the most under it, or None."""
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
    """Yield the part of the step that takes the most time longer than in the first candidate."""
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


def _advice(shape: ModelShape, cluster: Cluster, work: Workload, reference: ModelShape | None) -> Iterator[str]:
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
    """Yield how many devices of its own would hold a trainer that shares them."""
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
