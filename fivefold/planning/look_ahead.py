"""How many GPUs should train and how many generate, and what a look-ahead gains over synchronous training.

    recipe + lengths ─> ways to divide its GPUs ─> estimates of their times ─> simulation ─> the fastest for each age

The memory of a way is that of the longest sequences, as in any plan; its times are those of the mean length.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd

from fivefold.config.schema.train import TrainRecipe
from fivefold.layout.allocation import Allocation, RoleAllocation
from fivefold.planning.blueprint import Blueprint, draw_up
from fivefold.planning.copied_weights import overlapping_transport
from fivefold.planning.generation_time import LOGPROB_SECONDS, reading_seconds, sending_seconds, token_seconds
from fivefold.planning.lengths import Lengths
from fivefold.planning.question import Question
from fivefold.planning.role_plans import RolloutPlan, plan_trainer
from fivefold.planning.simulation import Outcome, Setting, WeightsBeside, simulate
from fivefold.planning.timing import HOST_LINK

AGES = (0, 1, 2, 4)
"""Values of `rollout.max_head_offpolicyness` that are compared."""
MOST_SPLITS = 15
"""Numbers of GPUs of the trainer that are looked at, evenly spaced."""


@dataclass(frozen=True)
class Split:
    """A way to divide the GPUs between trainer and rollout, with its times."""

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
        """GPUs that generate; on shared devices, the same ones."""
        return self.rollout.n_devices or 0


@dataclass(frozen=True)
class Choice:
    """The fastest split for one age."""

    max_age: int
    split: Split
    outcome: Outcome
    gain: float
    """Seconds of a synchronous step on its fastest split, divided by those of this one."""

    @property
    def weights_overlap(self) -> WeightsBeside | None:
        """How new weights come beside the next step; None: the trainer waits for the replicas."""
        return self.split.setting.weights_overlap if self.max_age else None


@dataclass(frozen=True)
class LookAhead:
    """What a look-ahead gains."""

    lengths: Lengths
    n_splits: int
    """Number of splits that fit, and that were compared."""
    choices: tuple[Choice, ...]
    """The fastest split of each age; empty if no split fits."""


def look_ahead(recipe: TrainRecipe, question: Question, lengths: Lengths, ages: Sequence[int] = AGES) -> LookAhead:
    """Simulate a recipe on all divisions of its GPUs.

    Args:
        recipe: the run.
        question: the plan's question about it.
        lengths: of its responses; longer ones than `gconfig.max_new_tokens` are cut off.
        ages: values of `rollout.max_head_offpolicyness`, the first of which is the one that others are compared with.

    Raises:
        ValueError: a recipe on CPU processes, or with more roles than an actor and a rollout.
    """
    roles = {role.role for role in question.allocation.roles}
    if roles != {"actor", "rollout"}:
        raise ValueError(
            f"--lengths divides GPUs between actor and rollout, but the recipe has {', '.join(sorted(roles))}; plan it "
            "without the other roles"
        )
    if question.gpus_per_node == 0:
        raise ValueError(
            "--lengths estimates the times of GPUs, but cluster.n_gpus_per_node is 0: name them, for example "
            "cluster.n_gpus_per_node=8"
        )
    lengths = lengths.at_most(recipe.gconfig.max_new_tokens)
    splits = list(_splits(recipe, question, lengths))
    return LookAhead(lengths, len(splits), tuple(fastest(splits, lengths, ages)))


def fastest(splits: Sequence[Split], lengths: Lengths, ages: Iterable[int]) -> Iterator[Choice]:
    """Yield the fastest of some splits for each age; gains are over the first age. Without splits, yield nothing."""
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
        # The fastest one is often that of the next age too, and then spares the simulation of most others.
        order.remove(index)
        order.insert(0, index)


def _splits(recipe: TrainRecipe, question: Question, lengths: Lengths) -> Iterator[Split]:
    """Yield the splits on which the plan fits."""
    by_role = {role.role: role for role in question.allocation.roles}
    actor, rollout = by_role["actor"], by_role["rollout"]
    n_gpus = question.n_nodes * question.gpus_per_node
    # The experts are spread over ranks of several replicas, which then come together.
    experts = actor.ep * actor.etp
    unit = actor.replica_size * (experts // gcd(experts, actor.tp * actor.cp))
    if n_gpus % unit == 0 and n_gpus % rollout.replica_size == 0:
        yield from _split(recipe, question, lengths, _on(actor, n_gpus), _on(rollout, n_gpus), shares=True)
    for n_training in _evenly(range(unit, n_gpus - rollout.replica_size + 1, unit), MOST_SPLITS):
        trainer, generator = _on(actor, n_training), _on(rollout, n_gpus - n_training)
        yield from _split(recipe, question, lengths, trainer, generator, shares=False)


def _on(role: RoleAllocation, n_gpus: int) -> RoleAllocation:
    """Return a role with as many replicas as have room."""
    return replace(role, dp=n_gpus // role.replica_size)


def _evenly(numbers: range, most: int) -> list[int]:
    if len(numbers) <= most:
        return list(numbers)
    return [numbers[round((index + 0.5) * len(numbers) / most - 0.5)] for index in range(most)]


def _split(
    recipe: TrainRecipe,
    question: Question,
    lengths: Lengths,
    actor: RoleAllocation,
    rollout: RoleAllocation,
    *,
    shares: bool,
) -> Iterator[Split]:
    """Yield one split, if the plan fits on it."""
    allocation = Allocation(((rollout, actor),) if shares else ((rollout,), (actor,)))
    blueprint = draw_up(replace(question, allocation=allocation, devices=None))
    if blueprint.fits:
        yield Split(actor, rollout, _setting(recipe, blueprint, lengths, shares=shares))


def _setting(recipe: TrainRecipe, blueprint: Blueprint, lengths: Lengths, *, shares: bool) -> Setting:
    question, (plan,) = blueprint.question, blueprint.rollouts
    prompt, layout = recipe.train_dataset.max_length, plan.placed.layout
    context = prompt + lengths.mean_progress
    slots = _slots(question, plan, context)
    # A server gives the cache back with devices that it shares; training refuses the key there.
    keeps_cache = recipe.rollout.keeps_cache(is_server=layout.is_server) and not (layout.is_server and shares)
    return Setting(
        batch_size=recipe.train_dataset.batch_size,
        group_size=recipe.gconfig.n_samples,
        n_replicas=layout.dp,
        slots=slots,
        token_seconds=token_seconds(
            layout,
            question.shape,
            question.gpu,
            plan.memory,
            sequence_length=question.work.sequence_length,
            context=context,
            slots=slots,
            element_bytes=question.rollout_bytes,
            tp_on_node=next((spread.ranks_per_node for spread in plan.spreads if spread.dimension == "tp"), 1),
        ),
        logprob_seconds=LOGPROB_SECONDS if layout.is_server else 0.0,
        train_seconds=_train_seconds(recipe, blueprint, prompt + lengths.mean),
        update_seconds=_update_seconds(blueprint, shares=shares),
        weights_overlap=_weights_overlap(recipe, blueprint),
        shares_devices=shares,
        reread_seconds=0.0 if keeps_cache else reading_seconds(layout, question.shape, question.gpu),
        prompt_tokens=prompt,
        max_running=recipe.rollout.max_concurrent_rollouts,
    )


def _slots(question: Question, plan: RolloutPlan, context: float) -> int:
    """Return how many sequences a replica decodes at one time: those for which a server's cache has room."""
    if not plan.placed.layout.is_server:
        return question.generation_batch
    room = plan.memory.sequences * question.work.sequence_length
    return max(1, min(question.generation_batch, int(room / context)))


def _train_seconds(recipe: TrainRecipe, blueprint: Blueprint, length: float) -> float:
    """Return the seconds of a training step on sequences of the mean length: forward passes and optimizer steps."""
    question, config = blueprint.question, recipe.actor
    work = replace(question.work, sequence_length=round(length))
    time = plan_trainer(replace(question, work=work), blueprint.placement["actor"]).time
    assert time is not None, "an actor is trained"
    computes_again = config.has_several_updates if config.recompute_logprob is None else config.recompute_logprob
    computes_again = computes_again or config.advantage == "optimal_token_baseline"
    n_forward = computes_again + (question.kept_reference is not None)
    # A third of the computation of a step is its forward pass.
    forward = (time.layers + time.head + time.exposed + time.bubble) / 3
    n_steps = question.generated / question.work.sequences
    return n_steps * (time.total * config.ppo_epochs + forward * n_forward)


def _weights_overlap(recipe: TrainRecipe, blueprint: Blueprint) -> WeightsBeside | None:
    """Return the parts of new weights with a look-ahead; None: the trainer waits for the replicas.

    Through host memory, they add up to the seconds for which a trainer waits. By NCCL, the copy is an extra one.
    """
    question = replace(blueprint.question, overlaps_weight_sync=recipe.rollout.overlap_weight_sync)
    transport = overlapping_transport(question, blueprint.placement)
    if transport is None:
        return None
    whole = sending_seconds(question.shape, question.rollout_bytes)
    on_link = question.shape.n_parameters * question.rollout_bytes / HOST_LINK
    if not transport.carries_weights:
        return WeightsBeside(copy_seconds=on_link, staging_seconds=0.0, swap_seconds=whole)
    return WeightsBeside(copy_seconds=on_link, staging_seconds=whole - 2 * on_link, swap_seconds=on_link)


def _update_seconds(blueprint: Blueprint, *, shares: bool) -> float:
    """Return the seconds of new weights; on shared devices, with those of state that leaves them and comes back."""
    seconds = sending_seconds(blueprint.question.shape, blueprint.question.rollout_bytes)
    if not shares:
        return seconds
    (trainer,) = blueprint.trainers
    moved = max(stage.on_host(blueprint.offloaded) - stage.on_host(()) for stage in trainer.memory)
    return seconds + 2 * moved / HOST_LINK
