"""Starts the roles of a recipe on the devices of their placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.cluster.group import WorkerGroup
from fivefold.cluster.role import Role
from fivefold.cluster.session import Session
from fivefold.config.paths import resolve_model_path
from fivefold.config.role_sections import model_paths
from fivefold.config.schema.engine import OffloadConfig
from fivefold.config.schema.preferences import RMRecipe
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.roles import ActorConfig, CriticConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.engine.contract import OFFLOADABLE, Offloadable
from fivefold.layout.placement import Placement
from fivefold.planning.beside_rollout import BesideRollout, beside_rollout, copies_state
from fivefold.roles.actor import Actor
from fivefold.roles.critic import Critic
from fivefold.roles.launch_frozen import frozen_models_of, frozen_specs, offloaded_frozen
from fivefold.roles.launch_reference import (
    ema_decay,
    offloaded_reference,
    reference_alone,
    reference_beside,
    reference_of,
)
from fivefold.roles.reference import Reference
from fivefold.roles.rollout import Rollout
from fivefold.roles.rollout_followers import launch_followers, rollout_role
from fivefold.roles.rollout_worker import RolloutWorker
from fivefold.roles.run_roles import Roles
from fivefold.roles.trainer_roles import engine_config, trainer_of, trainer_role
from fivefold.roles.trainer_worker import TrainerSpec, TrainerWorker
from fivefold.rollout.replica import ReplicaSpec
from fivefold.weights.host_memory import THROUGH_HOST
from fivefold.weights.transport import Route


def launch_roles(
    session: Session, recipe: TrainRecipe, placement: Placement, path: str, n_steps: int, route: Route
) -> Roles:
    """Start the processes of all roles of `recipe`.

    Args:
        session: the session of the run.
        recipe: the recipe.
        placement: the roles on their devices.
        path: the actor's model, folder or hub name.
        n_steps: training steps of the whole run.
        route: how weights travel from the actor to the rollout.
    """
    warmup = 0 if recipe.critic is None else recipe.critic.warmup_steps
    copies = _copies_state(session, recipe, placement, path)
    spec = actor_spec(recipe, placement, path, updates_of(recipe.actor, max(1, n_steps - warmup)), copies=copies)
    roles = [trainer_role("actor", placement, spec)]
    alone = reference_alone(recipe, placement, spec.model, copies=copies)
    beside = _beside_rollout(recipe, placement, path, session.gpu_memory)
    replica = replica_spec(recipe, placement, path, load_weights=False, route=route, reserved=beside.kept)
    critic_spec = (
        None if recipe.critic is None else _critic_spec(recipe, recipe.critic, placement, n_steps, copies=copies)
    )
    offloaded_by_critic = () if recipe.critic is None else _offloaded_by_critic(recipe.critic, placement)
    frozen = frozen_specs(recipe, placement)
    in_turn: list[tuple[Role, Sequence[Offloadable]]] = [
        (trainer_role(role, placement, each), offloaded_frozen(recipe, placement, role))
        for role, each in frozen.items()
    ]
    if alone is not None:
        in_turn.append((trainer_role("ref", placement, alone), offloaded_reference(recipe)))
    if critic_spec is not None:
        in_turn.append((trainer_role("critic", placement, critic_spec), offloaded_by_critic))
    rollout_processes = rollout_role(placement, replica, launch_followers(session, placement, replica))
    groups = _launch_with_rollout(session, rollout_processes, in_turn, roles, placement)
    trainer = trainer_of(groups["actor"], spec)
    actor = Actor(trainer, route)
    rollout = Rollout(
        groups["rollout"],
        shares_devices=bool(placement.sharers("rollout")),
        is_server=placement["rollout"].layout.is_server,
    )
    rollout.meet(actor)
    return Roles(
        actor=actor,
        rollout=rollout,
        reference=reference_of(recipe, groups, actor, alone, placement),
        offloaded=beside.offloaded,
        critic=None
        if critic_spec is None
        else Critic(
            trainer_of(groups["critic"], critic_spec),
            offloaded_by_critic,
            actor if "actor" in placement.sharers("critic") else None,
            beside.offloaded or asked_offload(recipe.actor.offload),
        ),
        frozen=frozen_models_of(recipe, placement, groups, frozen, actor),
    )


def updates_of(section: ActorConfig | CriticConfig, n_steps: int) -> int:
    """Return the optimizer steps that a role makes in so many training steps."""
    return n_steps * section.ppo_epochs * section.ppo_n_minibatches


def asked_offload(section: OffloadConfig) -> tuple[Offloadable, ...]:
    """Return what the recipe itself says that a role offloads."""
    return tuple(kind for kind in OFFLOADABLE if getattr(section, kind))


def _offloaded_by_critic(critic: CriticConfig, placement: Placement) -> tuple[Offloadable, ...]:
    """Return what the critic moves off its devices while it does not work: on GPUs, all of it if others work there."""
    by_default = bool(placement.sharers("critic")) and not placement.is_cpu
    wanted = {kind: getattr(critic.offload, kind) for kind in OFFLOADABLE}
    return tuple(kind for kind, is_wanted in wanted.items() if (by_default if is_wanted is None else is_wanted))


def _critic_spec(
    recipe: TrainRecipe, critic: CriticConfig, placement: Placement, n_steps: int, *, copies: bool
) -> TrainerSpec:
    """Return the spec of the critic's processes."""
    return TrainerSpec(
        model=engine_config(critic, resolve_model_path(critic.path)),
        layout=placement["critic"].layout,
        seed=recipe.seed,
        timeout_s=recipe.scheduler.timeout_s,
        tokenizer=resolve_model_path(recipe.tokenizer_path or recipe.actor.path),
        optimizer=critic.optimizer,
        total_steps=updates_of(critic, n_steps),
        value_head=True,
        copies_state=copies,
    )


@dataclass(frozen=True)
class Models:
    """The models of a run that does not generate."""

    actor: Actor
    reference: Reference | None = None
    """The model with which the actor is compared, if there is one."""


def launch_models(session: Session, recipe: Recipe, placement: Placement, path: str, total_steps: int) -> Models:
    """Start the processes of a run that does not generate: the actor's, and those of a reference that has its own."""
    copies = _copies_state(session, recipe, placement, path)
    spec = actor_spec(recipe, placement, path, total_steps, copies=copies)
    alone = reference_alone(recipe, placement, spec.model, copies=copies)
    in_turn = [] if alone is None else [(trainer_role("ref", placement, alone), offloaded_reference(recipe))]
    groups = _launch(session, in_turn, [trainer_role("actor", placement, spec)], placement)
    actor = Actor(trainer_of(groups["actor"], spec))
    return Models(actor, reference_of(recipe, groups, actor, alone, placement))


def actor_spec(
    recipe: Recipe, placement: Placement, path: str, total_steps: int, *, copies: bool = True
) -> TrainerSpec:
    """Return the spec of the actor's processes: its model, and the reference if that shares the processes.

    Args:
        recipe: the recipe.
        placement: the roles on their devices.
        path: the actor's model, folder or hub name.
        total_steps: optimizer steps of the whole run.
        copies: whether the processes copy their state to host memory for a checkpoint.
    """
    model = engine_config(recipe.actor, path)
    reference = reference_beside(recipe, placement, model)
    return TrainerSpec(
        model=model,
        layout=placement["actor"].layout,
        seed=recipe.seed,
        timeout_s=recipe.scheduler.timeout_s,
        tokenizer=resolve_model_path(recipe.tokenizer_path) if recipe.tokenizer_path else None,
        optimizer=recipe.actor.optimizer,
        total_steps=total_steps,
        reference=reference,
        offloads_reference=bool(offloaded_reference(recipe)),
        ema_decay=None if reference is None else ema_decay(recipe),
        value_head=isinstance(recipe, RMRecipe),
        value_bias=not isinstance(recipe, RMRecipe),
        copies_state=copies,
    )


def _launch(
    session: Session,
    in_turn: Sequence[tuple[Role, Sequence[Offloadable]]],
    together: Sequence[Role],
    placement: Placement,
) -> dict[str, WorkerGroup]:
    """Start all roles at once, unless they would need each other's memory.

    A role of `in_turn`, each with what it offloads while it does not work, does so before others start if it shares
    devices.
    """
    groups: dict[str, WorkerGroup] = {}
    together = list(together)
    for role, offloaded in in_turn:
        if offloaded and placement.sharers(role.name):
            groups |= session.launch(role)
            groups[role.name].call(TrainerWorker.offload, offloaded)
        else:
            together.append(role)
    groups |= session.launch(*together)
    for role, offloaded in in_turn:
        if offloaded and not placement.sharers(role.name):
            groups[role.name].call(TrainerWorker.offload, offloaded)
    return groups


def _launch_with_rollout(
    session: Session,
    rollout: Role,
    in_turn: Sequence[tuple[Role, Sequence[Offloadable]]],
    trainers: Sequence[Role],
    placement: Placement,
) -> dict[str, WorkerGroup]:
    """Start a rollout and other roles, as `_launch` says.

    A server that shares devices starts first, because it measures their free memory, and sleeps until the first weights
    are sent.
    """
    if not (placement["rollout"].layout.is_server and placement.sharers("rollout")):
        return _launch(session, in_turn, [rollout, *trainers], placement)
    groups = session.launch(rollout)
    groups["rollout"].call(RolloutWorker.sleep)
    return groups | _launch(session, in_turn, trainers, placement)


def replica_spec(
    recipe: TrainRecipe,
    placement: Placement,
    path: str,
    *,
    load_weights: bool,
    route: Route = THROUGH_HOST,
    reserved: int = 0,
) -> ReplicaSpec:
    """Return the spec of the rollout's replicas over the model at `path`.

    Args:
        recipe: the recipe.
        placement: the roles on their devices.
        path: the model, folder or hub name.
        load_weights: whether the replicas load the model's weights; otherwise an actor sends them.
        route: how the actor's weights travel.
        reserved: bytes that other roles keep on each of the rollout's devices.
    """
    layout, config = placement["rollout"].layout, recipe.rollout
    is_shared = bool(placement.sharers("rollout")) and not placement.is_cpu
    return ReplicaSpec(
        backend=layout.backend,
        path=path,
        tokenizer_path=recipe.tokenizer_path or path,
        dtype=config.dtype or recipe.actor.dtype,
        max_batch_size=config.max_batch_size,
        load_weights=load_weights,
        run=uuid4().hex[:8],
        tp=layout.tp,
        pp=layout.pp,
        max_length=_longest(recipe),
        seed=recipe.seed,
        can_sleep=is_shared,
        reserved=reserved,
        memory_fraction=config.memory_fraction,
        python=config.server_python,
        arguments=tuple(map(str, config.server_args)),
        max_restarts=config.max_server_restarts,
        server_timeout_s=config.server_timeout_s,
        new_tokens_per_chunk=config.new_tokens_per_chunk,
        keeps_cache=config.keeps_cache(is_server=layout.is_server),
        route=route,
        deterministic=recipe.actor.is_deterministic,
        needs_text=bool(recipe.gconfig.stop) or recipe.gconfig.min_new_tokens > 0,
    )


def _longest(recipe: TrainRecipe) -> int:
    """Return the most tokens that a prompt and its completion may have together."""
    rows = [recipe.train_dataset, *([recipe.valid_dataset] if recipe.valid_dataset else [])]
    return max(data.max_length for data in rows) + recipe.gconfig.max_new_tokens


def _copies_state(session: Session, recipe: Recipe, placement: Placement, path: str) -> bool:
    """Return whether trainers copy their state for a checkpoint: on GPUs, as the recipe or the plan says."""
    if not recipe.recover.is_enabled or recipe.recover.snapshot != "auto" or placement.is_cpu:
        return recipe.recover.snapshot != "blocking"
    folders = _folders(recipe, path)
    return copies_state(recipe, folders, gpu_memory=session.gpu_memory, host_memory=session.host_memory)


def _folders(recipe: Recipe, path: str) -> dict[str, Path]:
    """Return the local model folder of each role."""
    others = {role: resolve_model_folder(other) for role, other in model_paths(recipe).items()}
    return {"actor": resolve_model_folder(path), **others}


def _beside_rollout(recipe: TrainRecipe, placement: Placement, path: str, gpu_memory: int | None) -> BesideRollout:
    """Return how the roles on the rollout's devices wait while it is awake: as the plan says, on GPUs."""
    sharers = placement.sharers("rollout")
    if not sharers:
        return BesideRollout(0, ())
    if placement.is_cpu:
        return BesideRollout(0, asked_offload(recipe.actor.offload) if "actor" in sharers else ())
    return beside_rollout(recipe, _folders(recipe, path), gpu_memory=gpu_memory)
