"""The estimate of one role: memory of its ranks, the groups that they form, and the time of a step."""

from __future__ import annotations

from dataclasses import replace

from fivefold.families.shape import ModelShape
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.placement import RolePlacement
from fivefold.planning.estimates import ModelEstimate, RolloutEstimate, largest
from fivefold.planning.fsdp_memory import fsdp_memory
from fivefold.planning.groups import from_node_start, group_spreads, ranks_together
from fivefold.planning.inputs import Inputs, ModelInputs
from fivefold.planning.memory import RankMemory, training_memory
from fivefold.planning.rollout_memory import rollout_memory
from fivefold.planning.sending import served_bytes
from fivefold.planning.timing import step_time
from fivefold.planning.workload import RECOMPUTE, Recompute, Workload
from fivefold.rules.layouts import layout_problems

_FLOAT = 4
"""Bytes of a weight in float32."""
_ONLY_TRAINING = ("gradients", "optimizer", "host_optimizer", "snapshot", "update", "activations")
"""Kinds of memory that a frozen model does not have."""


def estimate_model(inputs: Inputs, placed: RolePlacement) -> ModelEstimate:
    """Return the estimate of a role that trains or scores, as if it shared its devices with no role.

    Raises:
        ValueError: a layout that the model cannot take, or a recompute mode that the engine does not have.
    """
    model = inputs.models[placed.role]
    require_possible(placed, model.shape)
    return _trained(inputs, model, placed) if model.trains else _frozen(inputs, model, placed)


def require_possible(placed: RolePlacement, shape: ModelShape) -> None:
    """Refuse a layout that a model cannot take.

    Raises:
        ValueError: a line for each problem.
    """
    if problems := list(layout_problems(placed.layout, shape)):
        raise ValueError("\n".join(f"{placed.role}: {line}" for line in problems))


def _trained(inputs: Inputs, model: ModelInputs, placed: RolePlacement) -> ModelEstimate:
    layout, shape, work = placed.layout, model.shape, model.work
    reference = inputs.hosted_reference if placed.role == "actor" else None
    if reference is not None:
        require_possible(replace(placed, role="ref"), reference.shape)
    known = recompute_modes(layout)
    if work.recompute not in known:
        raise ValueError(
            f"{placed.role}: recompute {work.recompute} is not a mode of {layout.backend}: use {' or '.join(known)}"
        )
    modes = {mode: _memory(layout, shape, work.recomputing(mode), reference) for mode in known}
    if not inputs.on_gpus:
        modes = {mode: tuple(replace(stage, context=0) for stage in memory) for mode, memory in modes.items()}
    # CPU processes are timed as if they were on one node.
    timed = placed if inputs.on_gpus else from_node_start(layout, layout.world_size)
    return ModelEstimate(
        placed,
        modes[work.recompute],
        step_time(layout, shape, work, inputs.gpu, ranks_together(timed, is_moe=shape.is_moe)),
        group_spreads(placed, is_moe=shape.is_moe),
        {mode: largest(memory) for mode, memory in modes.items()},
    )


def recompute_modes(layout: ParallelLayout) -> tuple[Recompute, ...]:
    """Return the recompute modes of a layout's engine, from the most memory to the most computation."""
    return ("none", "full") if layout.backend == "fsdp" else RECOMPUTE


def trainer_memory(
    layout: ParallelLayout, shape: ModelShape, work: Workload, reference: ModelShape | None = None
) -> tuple[RankMemory, ...]:
    """Return the memory of a rank of each stage of a trained model on its layout's engine.

    Args:
        layout: the layout.
        shape: the model.
        work: the work of a step.
        reference: a frozen model in the same processes.
    """
    if layout.backend == "fsdp":
        return (fsdp_memory(layout, shape, work, reference=reference),)
    return training_memory(layout, shape, work, reference=reference)


def _memory(
    layout: ParallelLayout, shape: ModelShape, work: Workload, reference: ModelInputs | None
) -> tuple[RankMemory, ...]:
    """Return the memory of a trained model with the reference that its processes hold."""
    memory = trainer_memory(layout, shape, work, None if reference is None else reference.shape)
    passes = work.infer_tokens or work.micro_tokens
    if reference is not None:
        memory = tuple(_with_reference(stage, reference, work.element_bytes) for stage in memory)
        passes = max(passes, reference.work.micro_tokens)
    if passes > work.micro_tokens:
        scoring = _scoring_memory(layout, shape, work.without_gradients(passes))
        memory = tuple(map(_with_larger_passes, memory, scoring))
    return memory


def _with_larger_passes(stage: RankMemory, scoring: RankMemory) -> RankMemory:
    """Return a rank's memory if passes without gradients have larger micro-batches, at the higher of both peaks.

    The activations of training are freed by then.
    """
    temporaries = max(scoring.temporaries, scoring.logprobs) - stage.activations
    buffers = max(stage.buffers, scoring.buffers)
    return replace(stage, temporaries=max(stage.temporaries, temporaries), buffers=buffers)


def _with_reference(stage: RankMemory, reference: ModelInputs, element_bytes: int) -> RankMemory:
    """Return the memory of an actor's rank whose reference was counted with `element_bytes` for each weight."""
    parameters = stage.reference // element_bytes
    weights = parameters * reference.work.element_bytes
    stage = _following(stage, reference, parameters)
    if reference.leaves.get("params"):
        return replace(stage, reference=0, host_reference=stage.host_reference + weights)
    return replace(stage, reference=weights)


def _following(stage: RankMemory, model: ModelInputs, parameters: int) -> RankMemory:
    """Return a rank's memory with what a model that follows the actor needs on the host.

    This is its EMA, unless its weights are float32 already, and the copy from which checkpoints are written.
    """
    has_average = bool(model.follows) and model.work.element_bytes < _FLOAT
    return replace(
        stage,
        host_reference=_FLOAT * parameters if has_average else 0,
        snapshot=stage.snapshot + (_FLOAT * parameters if model.follows is not None else 0),
    )


def _frozen(inputs: Inputs, model: ModelInputs, placed: RolePlacement) -> ModelEstimate:
    """Return the estimate of a frozen model: no gradients, no optimizer, and one layer's activations at a time."""
    context = {} if inputs.on_gpus else {"context": 0}
    memory = (
        replace(stage, **dict.fromkeys(_ONLY_TRAINING, 0), in_flight=0.0, **context)
        for stage in _scoring_memory(placed.layout, model.shape, model.work.recomputing("full"))
    )
    return ModelEstimate(
        placed,
        tuple(_following(stage, model, stage.weights // model.work.element_bytes) for stage in memory),
        None,
        group_spreads(placed, is_moe=model.shape.is_moe),
        {},
    )


def _scoring_memory(layout: ParallelLayout, shape: ModelShape, work: Workload) -> tuple[RankMemory, ...]:
    if layout.backend == "fsdp":
        return (fsdp_memory(layout, shape, work, is_trained=False),)
    return training_memory(layout, shape, work)


def estimate_rollout(inputs: Inputs, placed: RolePlacement, others: int) -> RolloutEstimate:
    """Return the estimate of a role that generates while other roles keep `others` bytes on the same GPUs."""
    (shape, length), generator = inputs.generated_with(placed.role), inputs.generator(placed.role)
    memory = rollout_memory(
        placed.layout,
        shape,
        inputs.gpu,
        sequence_length=length,
        batch_size=min(generator.batch, -(-generator.generated // placed.layout.dp)),
        element_bytes=generator.element_bytes,
        is_quantized=generator.is_quantized,
        drafts_by_layers=generator.drafts_by_layers,
        adapters=served_bytes(inputs, placed.layout) if generator is inputs.rollout else 0,
        taken=others,
        fraction=generator.memory_fraction,
    )
    if not inputs.on_gpus:
        memory = replace(memory, context=0)
    return RolloutEstimate(placed, memory, group_spreads(placed, is_moe=shape.is_moe), others)
