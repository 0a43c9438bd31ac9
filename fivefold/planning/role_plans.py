"""What each role of a plan needs: the memory of its ranks, the groups that they form, and the time of a step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from fivefold.families.check import layout_problems
from fivefold.families.shape import ModelShape
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.placement import RolePlacement
from fivefold.planning.fsdp_memory import fsdp_memory
from fivefold.planning.groups import GroupSpread, from_node_start, group_spreads, ranks_together
from fivefold.planning.memory import Kind, RankMemory, training_memory
from fivefold.planning.question import Question
from fivefold.planning.rollout_memory import RolloutMemory, rollout_memory
from fivefold.planning.timing import StepTime, step_time
from fivefold.planning.workload import RECOMPUTE, Recompute, Workload

_FLOAT = 4
"""Bytes of a weight in float32."""


@dataclass(frozen=True)
class TrainerPlan:
    """What a role that trains, or that computes the reference model's log-probs, needs."""

    placed: RolePlacement
    memory: tuple[RankMemory, ...]
    """Memory of a rank of each pipeline stage."""
    time: StepTime | None
    """Time of a step; None for a model that is not trained, whose time is not counted."""
    spreads: tuple[GroupSpread, ...]
    modes: Mapping[Recompute, RankMemory]
    """Memory of the stage that needs the most, by recompute mode; empty for a model that is not trained."""
    beside: int
    """Bytes that other roles keep on the same GPUs while this one works."""
    offloaded: tuple[Kind, ...] = ()
    """What a critic or a frozen model moves off its GPUs while it does not work."""

    @property
    def binding(self) -> RankMemory:
        """Memory of the stage that needs the most."""
        return largest(self.memory)

    @property
    def binding_rank(self) -> int:
        """The first rank of the stage that needs the most memory."""
        return self.binding.stage * (self.placed.layout.world_size // self.placed.layout.pp)


@dataclass(frozen=True)
class RolloutPlan:
    """What a role that generates needs."""

    placed: RolePlacement
    memory: RolloutMemory
    spreads: tuple[GroupSpread, ...]
    beside: int
    """Bytes that other roles keep on the same GPUs while this one works."""
    arriving: int = 0
    """Bytes of all roles on a GPU while new weights arrive, before there is a cache."""


def largest(stages: Iterable[RankMemory]) -> RankMemory:
    """Return the memory of the stage that needs the most."""
    return max(stages, key=lambda stage: stage.total)


def kept_bytes(trainer: TrainerPlan, offloaded: Collection[Kind] = ()) -> int:
    """Return the bytes that a trainer keeps on a GPU while it waits and `offloaded` is moved off."""
    return max(stage.kept(offloaded) for stage in trainer.memory)


def plan_trainer(question: Question, placed: RolePlacement) -> TrainerPlan:
    """Return what a role that trains, or a frozen model with devices of its own, needs if no role shares them.

    Raises:
        ValueError: a layout that the model cannot take, or a recompute mode that the engine does not have.
    """
    question = question.of(placed.role)
    layout, shape, work = placed.layout, question.shape, question.work
    if placed.role == "ref":
        return _reference(question, placed)
    if placed.role in question.frozen:
        return _frozen(question, placed)
    _require_possible(placed, shape)
    if question.kept_reference is not None:
        _require_possible(replace(placed, role="ref"), question.kept_reference)
    known = recompute_modes(layout)
    if work.recompute not in known:
        raise ValueError(
            f"{placed.role}: recompute {work.recompute} is not a mode of {layout.backend}: use {' or '.join(known)}"
        )
    modes = {mode: _memory(question, layout, work.recomputing(mode)) for mode in known}
    spreads = group_spreads(placed, is_moe=shape.is_moe)
    # CPU processes are timed as if on one node.
    timed = placed if question.gpus_per_node > 0 else from_node_start(layout, layout.world_size)
    time = step_time(layout, shape, work, question.gpu, ranks_together(timed, is_moe=shape.is_moe))
    binding = {mode: largest(memory) for mode, memory in modes.items()}
    return TrainerPlan(placed, modes[work.recompute], time, spreads, binding, beside=0)


def recompute_modes(layout: ParallelLayout) -> tuple[Recompute, ...]:
    """Return the recompute modes of a layout's engine, from the most memory to the most computation."""
    return ("none", "full") if layout.backend == "fsdp" else RECOMPUTE


def _memory(question: Question, layout: ParallelLayout, work: Workload) -> tuple[RankMemory, ...]:
    shape, reference = question.shape, question.kept_reference
    memory = trainer_memory(layout, shape, work, reference)
    if reference is not None:
        memory = tuple(_with_reference(stage, question) for stage in memory)
    own = work.infer_tokens or work.micro_tokens
    passes = max(own, question.reference_tokens or own) if reference is not None else own
    if passes > work.micro_tokens:
        scoring = _scoring_memory(layout, shape, work.without_gradients(passes))
        memory = tuple(map(_with_larger_passes, memory, scoring))
    return memory if question.gpus_per_node > 0 else tuple(replace(stage, context=0) for stage in memory)


def _with_larger_passes(stage: RankMemory, scoring: RankMemory) -> RankMemory:
    """Return a rank's memory where passes without gradients have larger micro-batches, at the higher of both moments.

    The activations of training are gone then.
    """
    temporaries = max(scoring.temporaries, scoring.logprobs) - stage.activations
    buffers = max(stage.buffers, scoring.buffers)
    return replace(stage, temporaries=max(stage.temporaries, temporaries), buffers=buffers)


def trainer_memory(
    layout: ParallelLayout, shape: ModelShape, work: Workload, reference: ModelShape | None = None
) -> tuple[RankMemory, ...]:
    """Return the memory of a rank of each stage of a trained model, on its layout's engine.

    Args:
        layout: the layout.
        shape: the model.
        work: the work of a step.
        reference: a frozen model in the same processes.
    """
    if layout.backend == "fsdp":
        return (fsdp_memory(layout, shape, work, reference=reference),)
    return training_memory(layout, shape, work, reference=reference)


def _require_possible(placed: RolePlacement, shape: ModelShape) -> None:
    if problems := list(layout_problems(placed.layout, shape)):
        raise ValueError("\n".join(f"{placed.role}: {line}" for line in problems))


def _reference(question: Question, placed: RolePlacement) -> TrainerPlan:
    """Return what a reference model with processes of its own needs."""
    work = question.work
    own = replace(
        work,
        element_bytes=question.reference_bytes or work.element_bytes,
        micro_tokens=question.reference_tokens or work.infer_tokens or work.micro_tokens,
        given_sequences=0,
        given_length=0,
    )
    plan = _frozen(replace(question, shape=question.reference or question.shape, work=own), placed)
    memory = (_with_average(stage, stage.weights // own.element_bytes, question) for stage in plan.memory)
    return replace(plan, memory=tuple(memory))


def _with_reference(stage: RankMemory, question: Question) -> RankMemory:
    """Return the memory of an actor's rank with the reference in its process as the recipe has it."""
    parameters = stage.reference // question.work.element_bytes
    weights = parameters * (question.reference_bytes or question.work.element_bytes)
    stage = _with_average(stage, parameters, question)
    if question.reference_is_offloaded:
        return replace(stage, reference=0, host_reference=stage.host_reference + weights)
    return replace(stage, reference=weights)


def _with_average(stage: RankMemory, parameters: int, question: Question) -> RankMemory:
    """Return a rank's memory with what a reference that follows the actor needs on the host.

    That is its average, unless its weights are in float32 themselves, and the copy from which checkpoints are written.
    """
    has_average = question.reference_is_average and (question.reference_bytes or question.work.element_bytes) < _FLOAT
    return replace(
        stage,
        host_reference=_FLOAT * parameters if has_average else 0,
        snapshot=stage.snapshot + (_FLOAT * parameters if question.reference_moves else 0),
    )


def _frozen(question: Question, placed: RolePlacement) -> TrainerPlan:
    """Return what a role that only computes predictions needs.

    It has neither gradients nor an optimizer, and one layer's activations at a time.
    """
    shape = question.shape
    _require_possible(placed, shape)
    context = {} if question.gpus_per_node > 0 else {"context": 0}
    gone = dict.fromkeys(("gradients", "optimizer", "host_optimizer", "snapshot", "update", "activations"), 0)
    memory = tuple(
        replace(stage, **gone, in_flight=0.0, **context)
        for stage in _scoring_memory(placed.layout, shape, question.work.recomputing("full"))
    )
    return TrainerPlan(placed, memory, None, group_spreads(placed, is_moe=shape.is_moe), {}, beside=0)


def _scoring_memory(layout: ParallelLayout, shape: ModelShape, work: Workload) -> tuple[RankMemory, ...]:
    if layout.backend == "fsdp":
        return (fsdp_memory(layout, shape, work, is_trained=False),)
    return training_memory(layout, shape, work)


def plan_rollout(question: Question, placed: RolePlacement, beside: int) -> RolloutPlan:
    """Return what a role that generates needs, where other roles keep `beside` bytes on the same GPUs."""
    shape = question.shape
    memory = rollout_memory(
        placed.layout,
        shape,
        question.gpu,
        sequence_length=question.work.sequence_length,
        batch_size=min(question.generation_batch, -(-question.generated // placed.layout.dp)),
        element_bytes=question.rollout_bytes,
        taken=beside,
        fraction=question.memory_fraction,
    )
    if question.gpus_per_node == 0:
        memory = replace(memory, context=0)
    return RolloutPlan(placed, memory, group_spreads(placed, is_moe=shape.is_moe), beside)


def gb(size: float) -> str:
    """Return bytes as GB (1e9), for texts."""
    return f"{size / 1e9:.1f}"
