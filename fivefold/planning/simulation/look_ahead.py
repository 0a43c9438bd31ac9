"""How many GPUs should train and how many generate, and what a look-ahead gains over synchronous training.

    recipe + lengths ─> splits of its GPUs ─> estimates of their times ─> simulation ─> the fastest split for each age

The memory of a split is estimated for the longest sequences, as in any plan, and its times for the mean length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

from fivefold.config.methods import LOSSES, scored
from fivefold.config.schema.train import TrainRecipe
from fivefold.layout.allocation import Allocation, RoleAllocation
from fivefold.planning.context_groups import ContextGroups, context_groups
from fivefold.planning.estimate import estimate
from fivefold.planning.estimates import Estimate, ModelEstimate, RolloutEstimate
from fivefold.planning.inputs import Inputs
from fivefold.planning.model_estimate import estimate_model
from fivefold.planning.sending import overlapping_transport
from fivefold.planning.simulation.decoding import LOGPROB_SECONDS, reading_seconds, sending_seconds, token_seconds
from fivefold.planning.simulation.lengths import Lengths
from fivefold.planning.simulation.run import Outcome, OverlappedWeights, Setting, simulate
from fivefold.planning.timing import HOST_LINK

AGES = (0, 1, 2, 4)
"""Values of `rollout.max_head_offpolicyness` that are compared; gains are over the first one."""
MOST_SPLITS = 15
"""Most numbers of training GPUs that are tried, evenly spaced."""


@dataclass(frozen=True)
class Split:
    """A division of the GPUs between trainer and rollout, with its times."""

    actor: RoleAllocation
    rollout: RoleAllocation
    setting: Setting
    """The run with synchronous training."""

    @property
    def n_training(self) -> int:
        """GPUs that train."""
        return self.actor.n_devices or 0

    @property
    def n_generating(self) -> int:
        """GPUs that generate; the same ones on shared devices."""
        return self.rollout.n_devices or 0


@dataclass(frozen=True)
class Choice:
    """The fastest split for one age."""

    max_age: int
    split: Split
    outcome: Outcome
    gain: float
    """Seconds of a synchronous step on its fastest split, over the seconds of this one."""

    @property
    def overlapped(self) -> OverlappedWeights | None:
        """How new weights arrive during the next step; None: the trainer waits for the replicas."""
        return self.split.setting.overlapped if self.max_age else None


@dataclass(frozen=True)
class LookAhead:
    """The gains of a look-ahead."""

    lengths: Lengths
    n_splits: int
    """Number of fitting splits that were compared."""
    choices: tuple[Choice, ...]
    """The fastest split for each age; empty if no split fits."""
    context: ContextGroups | None
    """What context-parallel groups by length would save of the recipe's update; None: it has no such parallelism."""


def look_ahead(recipe: TrainRecipe, inputs: Inputs, lengths: Lengths) -> LookAhead:
    """Simulate a recipe on all splits of its GPUs.

    Args:
        recipe: the run.
        inputs: the inputs of its plan.
        lengths: lengths of its responses, cut off at the most tokens that the recipe samples.

    Raises:
        ValueError: a recipe on CPU processes, or with more roles than an actor and a rollout, or more turns than the
            recipe has.
    """
    roles = {role.role for role in inputs.allocation.roles}
    if roles != {"actor", "rollout"}:
        raise ValueError(
            f"--lengths divides GPUs between actor and rollout, but the recipe has {', '.join(sorted(roles))}; plan it "
            "without the other roles"
        )
    if not inputs.on_gpus:
        raise ValueError(
            "--lengths estimates the times of GPUs, but cluster.n_gpus_per_node is 0: name them, for example "
            "cluster.n_gpus_per_node=8"
        )
    lengths = lengths.at_most(_most_sampled(recipe, lengths))
    splits = list(_splits(recipe, inputs, lengths))
    context = None
    if any(role.role == "actor" and role.cp > 1 for role in inputs.allocation.roles):
        given = recipe.train_dataset.max_length + lengths.given
        context = context_groups(inputs, _typical(estimate(inputs), given + lengths.mean), lengths, given)
    return LookAhead(lengths, len(splits), tuple(fastest(splits, lengths, AGES)), context)


def _most_sampled(recipe: TrainRecipe, lengths: Lengths) -> int:
    """Return the most tokens that an episode samples.

    Raises:
        ValueError: several turns, and nothing that plays them, or more than the recipe allows.
    """
    environment, most = recipe.environment, recipe.gconfig.max_new_tokens
    n_turns = 1 if environment is None else environment.max_turns
    if lengths.turns > n_turns:
        allowed = "no environment" if environment is None else f"environment.max_turns={n_turns}"
        raise ValueError(
            f"--lengths has turns={lengths.turns:g}, and the recipe {allowed}: lower one, or raise the other"
        )
    return most if environment is None else min(n_turns * most, environment.max_length)


def fastest(splits: Sequence[Split], lengths: Lengths, ages: Iterable[int]) -> Iterator[Choice]:
    """Yield the fastest split for each age, with its gain over the first age. Without splits, yield nothing."""
    bounds = [split.setting.least_seconds(lengths.mean) for split in splits]
    order = sorted(range(len(splits)), key=bounds.__getitem__)
    base: float | None = None
    for age in ages if splits else ():
        best: tuple[Outcome, int] | None = None
        for index in order:
            if best is not None and bounds[index] >= best[0].seconds:
                continue
            outcome = simulate(replace(splits[index].setting, max_age=age), lengths)
            if best is None or outcome.seconds < best[0].seconds:
                best = outcome, index
        assert best is not None
        outcome, index = best
        base = base or outcome.seconds
        yield Choice(age, splits[index], outcome, base / outcome.seconds)
        # The fastest split is often the fastest for the next age too, which then saves simulating most others.
        order.remove(index)
        order.insert(0, index)


def _splits(recipe: TrainRecipe, inputs: Inputs, lengths: Lengths) -> Iterator[Split]:
    """Yield the splits that fit."""
    by_role = {role.role: role for role in inputs.allocation.roles}
    actor, rollout = by_role["actor"], by_role["rollout"]
    n_gpus = inputs.n_nodes * inputs.gpus_per_node
    # Experts that are spread over ranks of several replicas tie these together.
    experts = actor.ep * actor.etp
    unit = actor.replica_size * (experts // gcd(experts, actor.tp * actor.cp))
    if n_gpus % unit == 0 and n_gpus % rollout.replica_size == 0:
        yield from _split(recipe, inputs, lengths, _on(actor, n_gpus), _on(rollout, n_gpus), shares=True)
    for n_training in _evenly(range(unit, n_gpus - rollout.replica_size + 1, unit), MOST_SPLITS):
        trainer, generator = _on(actor, n_training), _on(rollout, n_gpus - n_training)
        yield from _split(recipe, inputs, lengths, trainer, generator, shares=False)


def _on(role: RoleAllocation, n_gpus: int) -> RoleAllocation:
    """Return a role with as many replicas as fit."""
    return replace(role, dp=n_gpus // role.replica_size)


def _evenly(numbers: range, most: int) -> list[int]:
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[round((index + 0.5) * len(numbers) / most - 0.5)] for index in range(most)]


def _split(
    recipe: TrainRecipe,
    inputs: Inputs,
    lengths: Lengths,
    actor: RoleAllocation,
    rollout: RoleAllocation,
    *,
    shares: bool,
) -> Iterator[Split]:
    """Yield one split, if it fits."""
    allocation = Allocation(((rollout, actor),) if shares else ((rollout,), (actor,)))
    found = estimate(replace(inputs, allocation=allocation, devices=None))
    if found.fits:
        yield Split(actor, rollout, _setting(recipe, found, lengths, shares=shares))


def _setting(recipe: TrainRecipe, found: Estimate, lengths: Lengths, *, shares: bool) -> Setting:
    inputs, (rollout,) = found.inputs, found.rollouts
    shape, work, layout = inputs.actor.shape, inputs.actor.work, rollout.placed.layout
    prompt = recipe.train_dataset.max_length
    context = prompt + lengths.mean_progress + lengths.given / 2
    slots = _slots(inputs, rollout, context)
    # What an episode reads between its turns takes time for each token that it samples.
    reading = reading_seconds(layout, shape, inputs.gpu) * lengths.given / lengths.mean
    decoding = token_seconds(
        layout,
        shape,
        inputs.gpu,
        rollout.memory,
        sequence_length=work.sequence_length,
        context=context,
        slots=slots,
        element_bytes=inputs.rollout.element_bytes,
        tp_on_node=next((spread.ranks_per_node for spread in rollout.spreads if spread.dimension == "tp"), 1),
    )
    # A server gives up its cache with devices that it shares; training refuses the key then.
    keeps_cache = recipe.rollout.keeps_cache(is_server=layout.is_server) and not (layout.is_server and shares)
    return Setting(
        batch_size=recipe.train_dataset.batch_size,
        group_size=recipe.gconfig.n_samples,
        n_replicas=layout.dp,
        slots=slots,
        token_seconds=tuple(seconds + n * reading for n, seconds in enumerate(decoding)),
        logprob_seconds=LOGPROB_SECONDS if layout.is_server else 0.0,
        train_seconds=_train_seconds(recipe, found, prompt + lengths.mean + lengths.given),
        update_seconds=_update_seconds(found, shares=shares),
        overlapped=_overlapped_weights(recipe, found),
        shares_devices=shares,
        reread_seconds=0.0 if keeps_cache else reading_seconds(layout, shape, inputs.gpu),
        prompt_tokens=prompt + lengths.given / 2,
        max_running=recipe.rollout.max_concurrent_rollouts,
    )


def _slots(inputs: Inputs, rollout: RolloutEstimate, context: float) -> int:
    """Return how many sequences a replica decodes at one time; a server's cache must have room for them."""
    if not rollout.placed.layout.is_server:
        return inputs.rollout.batch
    room = rollout.memory.sequences * inputs.actor.work.sequence_length
    return max(1, min(inputs.rollout.batch, int(room / context)))


def _train_seconds(recipe: TrainRecipe, found: Estimate, length: float) -> float:
    """Return the seconds of a training step on sequences of the mean length: forward passes and optimizer steps."""
    inputs, config = found.inputs, recipe.actor
    time = _typical(found, length).time
    assert time is not None, "an actor is trained"
    computes_again = config.moves_from_old if config.recompute_logprob is None else config.recompute_logprob
    loss = LOSSES.get(config.loss)
    compares = config.rollout_correction.needs_old_logprobs or (loss is not None and loss.chooses_by is not None)
    computes_again = computes_again or compares or config.advantage in scored()
    n_forward = computes_again + (inputs.hosted_reference is not None)
    # A third of the computation of a step is its forward pass.
    forward = (time.layers + time.head + time.exposed + time.bubble) / 3
    n_steps = inputs.rollout.generated / inputs.actor.work.sequences
    return n_steps * (time.total * config.ppo_epochs + forward * n_forward)


def _typical(found: Estimate, length: float) -> ModelEstimate:
    """Return the actor's estimate for sequences of `length` tokens."""
    inputs, actor = found.inputs, found.inputs.actor
    typical = replace(actor, work=replace(actor.work, sequence_length=round(length)))
    models = {**inputs.models, "actor": typical}
    return estimate_model(replace(inputs, models=models), found.placement["actor"])


def _overlapped_weights(recipe: TrainRecipe, found: Estimate) -> OverlappedWeights | None:
    """Return the parts of new weights that overlap the next step; None: the trainer waits for the replicas.

    Through host memory, they add up to the seconds for which a trainer would wait. With NCCL, the copy is extra.
    """
    rollout = replace(found.inputs.rollout, overlaps_sync=recipe.rollout.overlap_weight_sync)
    transport = overlapping_transport(replace(found.inputs, rollout=rollout), found.placement)
    if transport is None:
        return None
    shape = found.inputs.actor.shape
    whole = sending_seconds(shape, rollout.element_bytes)
    on_link = shape.n_live_parameters * rollout.element_bytes / HOST_LINK
    if not transport.carries_weights:
        return OverlappedWeights(copy_seconds=on_link, staging_seconds=0.0, swap_seconds=whole)
    return OverlappedWeights(copy_seconds=on_link, staging_seconds=whole - 2 * on_link, swap_seconds=on_link)


def _update_seconds(found: Estimate, *, shares: bool) -> float:
    """Return the seconds of new weights; on shared devices, also of state that leaves them and comes back."""
    seconds = sending_seconds(found.inputs.actor.shape, found.inputs.rollout.element_bytes)
    if not shares:
        return seconds
    (actor,) = found.models
    moved = max(stage.on_host(found.offloaded) - stage.on_host(()) for stage in actor.memory)
    return seconds + 2 * moved / HOST_LINK
