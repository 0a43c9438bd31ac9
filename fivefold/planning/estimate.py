"""Estimates a whole run.

Inputs ─> placement ─> each role alone ─> what leaves the actor's GPUs for the rollout ─> what roles keep while
                                                                                          others work ─> Estimate
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fivefold.config.schema.role import Offloadable
from fivefold.layout.placement import Placement, RolePlacement
from fivefold.planning.estimates import Estimate, ModelEstimate, RolloutEstimate
from fivefold.planning.host_memory import HostMemory, exceeds_host, host_memory
from fivefold.planning.inputs import Inputs, leaves_if, offload_steps
from fivefold.planning.memory import RankMemory
from fivefold.planning.model_estimate import estimate_model, estimate_rollout
from fivefold.planning.problems import notes_of, problems_of, rollout_problems
from fivefold.planning.sending import (
    copied_weights,
    kept_while_sending,
    may_stream_frozen,
    overlapping_bytes,
    sending_bytes,
    serves_adapters,
)
from fivefold.planning.sharing import Sharing
from fivefold.weights.table import pick


def estimate(inputs: Inputs) -> Estimate:
    """Place the roles and add up what they need.

    Raises:
        ValueError: roles that do not fit on the cluster, or a layout that a model cannot take.
    """
    placement = inputs.place()
    training = [placed for placed in placement.roles if placed.layout.is_training]
    models = {placed.role: estimate_alone(inputs, placement, placed) for placed in training}
    if "actor" in models and "rollout" in placement:
        models["actor"] = _with_sending(models["actor"], inputs, placement)
    sharing, rollouts = _offloading(Sharing(inputs, placement, models))
    models = {role: replace(model, others=sharing.others(role)) for role, model in models.items()}
    copies_state, needed = _host_memory(inputs, placement, models, sharing.offloaded, rollouts)
    found = Estimate(
        inputs,
        placement,
        tuple(models.values()),
        rollouts,
        sharing.offloaded,
        copies_state,
        needed,
        streams_frozen=sharing.streams_frozen,
    )
    return replace(found, problems=tuple(problems_of(found)), notes=tuple(notes_of(found)))


def estimate_alone(inputs: Inputs, placement: Placement, placed: RolePlacement) -> ModelEstimate:
    """Return the estimate of a role that trains or scores as if no role shared its devices, and what it offloads.

    What the actor offloads depends on the rollout.
    """
    model = estimate_model(inputs, placed)
    if placed.role == "actor":
        return model
    shares = bool(placement.sharers(placed.role)) and inputs.on_gpus
    return replace(model, offloaded=leaves_if(inputs.models[placed.role].leaves, shares=shares))


def _with_sending(actor: ModelEstimate, inputs: Inputs, placement: Placement) -> ModelEstimate:
    """Return the actor's estimate with the buckets in which its weights go to the rollout."""
    model, transport = inputs.actor, pick(inputs.rollout.transport, placement)
    sending = sending_bytes(actor.placed.layout, model.shape, transport, element_bytes=model.work.element_bytes)
    overlapping = overlapping_bytes(inputs, placement)

    def sends(stage: RankMemory) -> RankMemory:
        return replace(stage, sending=sending, buffers=stage.buffers + overlapping)

    return replace(
        actor,
        memory=tuple(sends(stage) for stage in actor.memory),
        modes={mode: sends(stage) for mode, stage in actor.modes.items()},
    )


def _offloading(sharing: Sharing) -> tuple[Sharing, tuple[RolloutEstimate, ...]]:
    """Let the actor offload as little as leaves its rollouts enough room, and return the rollouts then."""
    inputs, generating = sharing.inputs, [placed for placed in sharing.placement.roles if not placed.layout.is_training]
    rollouts: tuple[RolloutEstimate, ...] = ()
    for offloaded, streams_frozen in _offload_steps(sharing, [placed.role for placed in generating]):
        sharing = replace(sharing, offloaded=offloaded, streams_frozen=streams_frozen)
        rollouts = tuple(_rollout(sharing, placed) for placed in generating)
        if all(_has_room(rollout, inputs) for rollout in rollouts):
            break
    return sharing, rollouts


def _offload_steps(sharing: Sharing, generating: list[str]) -> Iterator[tuple[tuple[Offloadable, ...], bool]]:
    """Yield what the actor could offload, and whether frozen weights are sent from host memory, from the least on.

    It is nothing if no rollout shares its GPUs.
    """
    offloaded: tuple[Offloadable, ...] = ()
    if not sharing.inputs.on_gpus or not any("actor" in sharing.placement.sharers(role) for role in generating):
        yield offloaded, False
        return
    for offloaded in offload_steps(sharing.inputs.actor.leaves):
        yield offloaded, False
    if may_stream_frozen(sharing.models["actor"].memory, offloaded):
        yield offloaded, True


def _rollout(sharing: Sharing, placed: RolePlacement) -> RolloutEstimate:
    role, others = placed.role, sharing.others(placed.role)
    rollout = estimate_rollout(sharing.inputs, placed, others)
    if sharing.inputs.generator(role) is not sharing.inputs.rollout:
        return rollout  # its weights never change
    arriving = rollout.memory.weights + sharing.asleep(role) + others
    if "actor" in sharing.placement.sharers(role):
        stages = sharing.models["actor"].memory
        kept = (kept_while_sending(stage, sharing.offloaded, streams_frozen=sharing.streams_frozen) for stage in stages)
        arriving += max(kept) - sharing.kept("actor", role)
    return replace(rollout, arriving=arriving)


def _has_room(rollout: RolloutEstimate, inputs: Inputs) -> bool:
    """Return whether a rollout holds as many of the longest sequences as it decodes at one time."""
    if any(rollout_problems(rollout, inputs)):
        return False
    generator = inputs.generator(rollout.placed.role)
    wanted = min(generator.batch, -(-generator.generated // rollout.placed.layout.dp))
    return rollout.memory.sequences >= wanted


def _kept_asleep(inputs: Inputs, placement: Placement, rollout: RolloutEstimate) -> int:
    """Return the bytes of weights that a rank keeps in host memory to sleep: those that nobody sends it again."""
    role = rollout.placed.role
    # SGLang keeps all weights or none, and a tower that sees images is never sent.
    keeps_tower = rollout.placed.layout.backend == "sglang" and inputs.actor.shape.vision is not None
    is_sent = inputs.generator(role) is inputs.rollout and not serves_adapters(inputs) and not keeps_tower
    keeps = inputs.on_gpus and not is_sent and bool(placement.sharers(role))
    return rollout.memory.weights if keeps else 0


def _host_memory(
    inputs: Inputs,
    placement: Placement,
    models: Mapping[str, ModelEstimate],
    offloaded: tuple[Offloadable, ...],
    rollouts: Sequence[RolloutEstimate],
) -> tuple[bool, dict[int, HostMemory]]:
    """Return whether trainers copy their state for checkpoints, and the host memory that the roles then need."""
    ranks = [
        (model.placed, model.memory, offloaded if role == "actor" else model.offloaded)
        for role, model in models.items()
    ]
    generating = [(each.placed, _kept_asleep(inputs, placement, each)) for each in rollouts]
    without, copying = (
        host_memory(ranks, generating, copies_state=copies, copied_weights=copied_weights(inputs, placement))
        for copies in (False, True)
    )
    if not inputs.writes_checkpoints or inputs.snapshot == "blocking":
        return False, without
    is_free = inputs.snapshot == "copy" or not inputs.on_gpus or not exceeds_host(copying, inputs.host_memory_gib)
    return (True, copying) if is_free else (False, without)
