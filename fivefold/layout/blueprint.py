"""A whole plan: every role on its devices, its memory, its time, and what stands in its way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fivefold.layout.allocation import Allocation
from fivefold.layout.gpus import Gpu
from fivefold.layout.memory import RankMemory, training_memory
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.placement import Placement, RolePlacement, place_allocation
from fivefold.layout.plan_shape import PlanShape
from fivefold.layout.rollout_memory import RolloutMemory, rollout_memory
from fivefold.layout.stages import plan_problems
from fivefold.layout.timing import StepTime, step_time
from fivefold.layout.workload import RECOMPUTE, Recompute, Workload

HEADROOM = 0.05
"""Of a GPU's memory, what fragmentation and uneven experts may take: with less left, a plan is tight."""


@dataclass(frozen=True)
class Question:
    """What is to be planned."""

    shape: PlanShape
    gpu: Gpu
    allocation: Allocation
    n_nodes: int
    gpus_per_node: int
    """0: CPU processes, planned as if each had a GPU."""
    work: Workload
    generation_batch: int
    """Most sequences that a replica of the embedded engine decodes together."""
    generated: int
    """Sequences that all replicas generate in a step."""
    keeps_reference: bool
    """Whether the actor's processes also hold the frozen reference model."""


@dataclass(frozen=True)
class TrainerPlan:
    """A role that trains."""

    placed: RolePlacement
    memory: tuple[RankMemory, ...]
    """Of a rank of each pipeline stage."""
    time: StepTime | None
    """None for a reference model, which takes no step of its own."""

    @property
    def binding(self) -> RankMemory:
        """The stage that needs the most."""
        return max(self.memory, key=lambda stage: stage.total)

    @property
    def binding_rank(self) -> int:
        """The first rank of that stage."""
        return self.binding.stage * (self.placed.layout.world_size // self.placed.layout.pp)


@dataclass(frozen=True)
class RolloutPlan:
    """A role that generates."""

    placed: RolePlacement
    memory: RolloutMemory
    beside: int
    """Bytes that a trainer keeps on the same GPUs while this role works."""


@dataclass(frozen=True)
class Blueprint:
    """The answer to a question."""

    question: Question
    placement: Placement
    trainers: tuple[TrainerPlan, ...]
    rollouts: tuple[RolloutPlan, ...]
    problems: tuple[str, ...]
    """Why it cannot run."""
    notes: tuple[str, ...]
    """What would run, but is wasteful or uncertain."""

    @property
    def fits(self) -> bool:
        return not self.problems


def draw_up(question: Question) -> Blueprint:
    """Place the roles and add up what they need.

    Raises:
        ValueError: roles that do not fit on the cluster, or a backend whose memory is not known.
    """
    placement = place_allocation(question.allocation, question.n_nodes, question.gpus_per_node)
    trainers = tuple(_trainer(question, placed) for placed in placement.roles if placed.layout.is_training)
    rollouts = tuple(
        _rollout(question, placement, placed, trainers) for placed in placement.roles if not placed.layout.is_training
    )
    blueprint = Blueprint(question, placement, trainers, rollouts, (), ())
    problems = (*_model_problems(blueprint), *_memory_problems(blueprint))
    return Blueprint(question, placement, trainers, rollouts, problems, tuple(_notes(blueprint)))


def _trainer(question: Question, placed: RolePlacement) -> TrainerPlan:
    layout = placed.layout
    if layout.backend != "megatron":
        raise ValueError(
            f"{placed.role} runs {layout.backend}, whose memory and speed are not modelled; plan it as megatron, "
            f"for example megatron:d{layout.dp}t{layout.tp}"
        )
    if problems := list(plan_problems(layout, question.shape)):
        raise ValueError("\n".join(f"{placed.role}: {line}" for line in problems))
    if placed.role == "ref":
        return TrainerPlan(placed, _frozen(question, placed), None)
    memory = training_memory(layout, question.shape, question.work, has_reference=question.keeps_reference)
    time = step_time(layout, question.shape, question.work, question.gpu, question.gpus_per_node or layout.world_size)
    if question.gpus_per_node == 0:
        memory = tuple(replace(stage, context=0) for stage in memory)
    return TrainerPlan(placed, memory, time)


def _frozen(question: Question, placed: RolePlacement) -> tuple[RankMemory, ...]:
    """Of a role that only computes log-probs: no gradients, no optimizer, one layer's activations at a time."""
    work = question.work.recomputing("full")
    stages = training_memory(placed.layout, question.shape, work)
    return tuple(
        RankMemory(**{**vars(stage), "gradients": 0, "optimizer": 0, "activations": 0, "in_flight": 0.0})
        for stage in stages
    )


def _rollout(
    question: Question, placement: Placement, placed: RolePlacement, trainers: tuple[TrainerPlan, ...]
) -> RolloutPlan:
    sharers = placement.sharers(placed.role)
    taken = max((trainer.binding.resident for trainer in trainers if trainer.placed.role in sharers), default=0)
    memory = rollout_memory(
        placed.layout,
        question.shape,
        question.gpu,
        sequence_length=question.work.sequence_length,
        batch_size=min(question.generation_batch, -(-question.generated // placed.layout.dp)),
        element_bytes=question.work.element_bytes,
        taken=taken,
    )
    if question.gpus_per_node == 0:
        memory = replace(memory, context=0)
    return RolloutPlan(placed, memory, taken)


def _model_problems(blueprint: Blueprint) -> Iterator[str]:
    for rollout in blueprint.rollouts:
        for line in plan_problems(rollout.placed.layout, blueprint.question.shape):
            yield f"{rollout.placed.role}: {line}"
    for trainer in blueprint.trainers:
        if trainer.time is not None and trainer.placed.layout.dp > blueprint.question.work.sequences:
            yield (
                f"{trainer.placed.role}: d{trainer.placed.layout.dp} shares out {blueprint.question.work.sequences} "
                "sequences of a step: some ranks would have none; use fewer replicas or more sequences"
            )


def _memory_problems(blueprint: Blueprint) -> Iterator[str]:
    question = blueprint.question
    if question.gpus_per_node == 0:
        return
    room = question.gpu.memory
    for trainer in blueprint.trainers:
        stage = trainer.binding
        if stage.total > room:
            yield (
                f"{trainer.placed.role}: rank {trainer.binding_rank} (stage {stage.stage}) needs {gb(stage.total)} GB "
                f"of the {gb(room)} GB of a {question.gpu.name}; {_relief(trainer, question)}"
            )
    for rollout in blueprint.rollouts:
        needed = rollout.memory.total + rollout.beside
        beside = f", besides the {gb(rollout.beside)} GB that the trainer keeps" if rollout.beside else ""
        if needed > room:
            yield (
                f"{rollout.placed.role}: a rank needs {gb(rollout.memory.total)} GB{beside}, of the {gb(room)} GB of a "
                f"{question.gpu.name}; split replicas further (t), give roles devices of their own, or lower "
                "rollout.max_batch_size"
            )
        elif rollout.memory.sequences == 0:
            yield (
                f"{rollout.placed.role}: {gb(rollout.memory.weights)} GB of weights{beside} leave no room for the keys "
                f"and values of one sequence of {question.work.sequence_length} tokens; split replicas further (t)"
            )


def _relief(trainer: TrainerPlan, question: Question) -> str:
    """The first thing to try for a stage that is too large."""
    stage = trainer.binding
    if stage.resident > question.gpu.memory:
        return "its weights and optimizer alone are too large: split the model further (p, t, e), or add replicas (d)"
    for recompute in RECOMPUTE[RECOMPUTE.index(question.work.recompute) + 1 :]:
        needed = _largest(question, trainer.placed.layout, recompute)
        if needed <= question.gpu.memory:
            return f"with actor.megatron.recompute={recompute} it needs {gb(needed)} GB"
    return "nor does full recomputation help enough: lower actor.mb_spec.max_tokens_per_mb, or split further (c, t, p)"


def _largest(question: Question, layout: ParallelLayout, recompute: Recompute) -> int:
    """What the largest stage needs under another recompute mode."""
    work = question.work.recomputing(recompute)
    memory = training_memory(layout, question.shape, work, has_reference=question.keeps_reference)
    return max(stage.total for stage in memory)


def _notes(blueprint: Blueprint) -> Iterator[str]:
    question = blueprint.question
    shape = question.shape
    if not shape.is_trainable:
        yield f"{shape.name} ({shape.family}) is planned from its sizes alone: there is no engine that trains it yet"
    yield from blueprint.placement.warnings()
    for trainer in blueprint.trainers:
        if question.gpus_per_node == 0:
            continue
        left = question.gpu.memory - trainer.binding.total
        if 0 <= left < HEADROOM * question.gpu.memory:
            yield (
                f"{trainer.placed.role}: rank {trainer.binding_rank} (stage {trainer.binding.stage}) has {gb(left)} GB "
                "to spare, which uneven experts or fragmentation may take"
            )
        yield from _time_notes(trainer)
    for rollout in blueprint.rollouts:
        if sharers := blueprint.placement.sharers(rollout.placed.role):
            yield f"{rollout.placed.role} shares its devices with {', '.join(sharers)}: it sleeps while they work"


def _time_notes(trainer: TrainerPlan) -> Iterator[str]:
    role, layout, time = trainer.placed.role, trainer.placed.layout, trainer.time
    if time is None:
        return
    if time.bubble_share > 0.15:
        fewer = "add v, " if layout.vpp == 1 else ""
        yield (
            f"{role}: {time.bubble_share:.0%} of a step waits for the pipeline: {time.micro_batches} micro-batches "
            f"over {layout.pp} stages; {fewer}take fewer stages or more sequences a step"
        )
    for item in time.traffic:
        if item.dimension in ("ep", "etp") and item.crosses_nodes:
            yield f"{role}: {item.dimension} groups cross nodes; their all-to-all takes the network at every MoE layer"
    if time.launching > 0.1 * time.total:
        busy = "launches kernels and starts the experts' exchanges" if layout.ep > 1 else "launches kernels"
        yield (
            f"{role}: {time.launching / time.total:.0%} of a step the GPU waits for the host, which {busy}; larger "
            "micro-batches (actor.mb_spec.max_tokens_per_mb) wait less"
        )


def gb(size: float) -> str:
    """Bytes as GB (1e9), for texts."""
    return f"{size / 1e9:.1f}"
