"""Starts the roles of a recipe on the devices of their placement.

Role ──trainer_specs──> TrainerSpec ──_start──> processes ──_models──> Models, or Roles with a rollout
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.cluster.group import WorkerGroup
from fivefold.cluster.role import Role as Processes
from fivefold.cluster.session import Session
from fivefold.config.roles import Role, model_paths, roles_of
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.engine.contract import Offloadable
from fivefold.engine.packing import BatchPlanner
from fivefold.families.read import load_shape
from fivefold.layout.placement import Placement
from fivefold.planning.decisions import ALWAYS_ON_DEVICE, WhileGenerating, copies_state, while_generating
from fivefold.roles.actor import Actor
from fivefold.roles.devices import Models, Roles
from fivefold.roles.engines import engine_module
from fivefold.roles.frozen import FrozenModel, HostedModel
from fivefold.roles.hand_over import RolesInTurn
from fivefold.roles.models import TrainedModel, Trainer, Turn
from fivefold.roles.rollout import Rollout
from fivefold.roles.rollout_followers import launch_followers, rollout_role
from fivefold.roles.rollout_worker import RolloutWorker
from fivefold.roles.specs import hosted_roles, leaves, trainer_specs
from fivefold.roles.trainer_worker import TrainerSpec, TrainerWorker
from fivefold.roles.weight_sync import WeightSync
from fivefold.rollout.chat_template import ChatTemplate
from fivefold.rollout.replica import ReplicaSpec
from fivefold.rules.vision import image_keys, most_pixels
from fivefold.weights.host_memory import THROUGH_HOST
from fivefold.weights.transport import Route

if TYPE_CHECKING:
    from fivefold.families.served import ServedAdapters


def launch_roles(session: Session, recipe: TrainRecipe, placement: Placement, n_steps: int, route: Route) -> Roles:
    """Start the processes of all roles of a recipe that generates.

    Args:
        session: the session of the run.
        recipe: the recipe.
        placement: the roles on their devices.
        n_steps: training steps of the whole run.
        route: how weights travel from the actor to the rollout.
    """
    specs = trainer_specs(recipe, placement, n_steps, copies=_copies_state(session, recipe, placement))
    waiting = _while_generating(recipe, placement, session.gpu_memory)
    path = specs["actor"].model.path
    replica = replica_spec(
        recipe, placement, path, load_weights=False, route=route, reserved=waiting.kept.get("rollout", 0)
    )
    replicas = rollout_role(placement, replica, launch_followers(session, placement, replica))
    groups: dict[str, WorkerGroup] = {}
    together = [replicas]
    if placement["rollout"].layout.is_server and placement.sharers("rollout"):
        # A server measures the free memory of its devices when it starts, and sleeps until the first weights are sent.
        # The models' processes import their libraries meanwhile, which takes no memory of the devices.
        session.create(*(_processes(name, placement, spec) for name, spec in specs.items()))
        groups, together = session.launch(replicas), []
        groups["rollout"].call(RolloutWorker.sleep)
    if "judge" in placement:
        from fivefold.roles import judge_launch  # here, because most runs have none

        spec = judge_launch.judge_spec(recipe, placement, waiting.kept.get("judge", 0))
        groups |= judge_launch.launch_judge(session, placement, spec)
    groups |= _start(session, recipe, placement, specs, together)
    models = _models(recipe, placement, specs, groups, waiting, verifies=route.checksum)
    in_turn = bool(placement.sharers("rollout"))
    is_server = placement["rollout"].layout.is_server
    rollout = Rollout(groups["rollout"], shares_devices=in_turn, is_server=is_server)
    sync = WeightSync(route, groups["actor"], groups["rollout"])
    sync.meet()
    judge = None
    if "judge" in placement:
        judge = judge_launch.judge_replicas(groups["judge"], placement, rollout, models.actor, waiting.offloaded)
    kind = RolesInTurn if in_turn else Roles
    return kind(models.actor, models.further, models.frozen, rollout=rollout, sync=sync, judge=judge)


def launch_models(session: Session, recipe: Recipe, placement: Placement, n_steps: int) -> Models:
    """Start the processes of all roles of a recipe that does not generate."""
    specs = trainer_specs(recipe, placement, n_steps, copies=_copies_state(session, recipe, placement))
    return _models(recipe, placement, specs, _start(session, recipe, placement, specs))


def launch_frozen(session: Session, recipe: TrainRecipe, placement: Placement) -> dict[str, FrozenModel]:
    """Start the frozen models that are placed, without an actor; return their handles by role."""
    specs = trainer_specs(recipe, placement, n_steps=1)
    return _frozen(recipe, placement, specs, _start(session, recipe, placement, specs), None)


def _start(
    session: Session,
    recipe: Recipe,
    placement: Placement,
    specs: Mapping[str, TrainerSpec],
    others: Sequence[Processes] = (),
) -> dict[str, WorkerGroup]:
    """Start the processes of models and of `others` at once, unless they would need each other's memory.

    A model that leaves shared devices while it does not work does so before others start. The actor's state stays where
    it is until it sends its weights.
    """
    roles, groups, together = roles_of(recipe), dict[str, WorkerGroup](), list(others)
    left = {name: () if name == "actor" else leaves(roles[name], placement) for name in specs}
    for name, spec in specs.items():
        processes = _processes(name, placement, spec)
        if left[name] and placement.sharers(name):
            groups |= session.launch(processes)
            groups[name].call(TrainerWorker.offload, left[name])
        else:
            together.append(processes)
    if together:
        groups |= session.launch(*together)
    for processes in together:
        if what := left.get(processes.name):
            groups[processes.name].call(TrainerWorker.offload, what)
    return groups


def _processes(name: str, placement: Placement, spec: TrainerSpec) -> Processes:
    """Return the processes of a model on its devices."""
    return Processes(
        name,
        placement[name].devices,
        TrainerWorker,
        (spec,),
        distributed=True,
        writes_run=spec.options.optimizer is not None,
        imports=engine_module(spec.layout.backend),
    )


def _trainer(group: WorkerGroup, spec: TrainerSpec) -> Trainer:
    """Return the driver's handle of processes that were started with `spec`."""
    engines = [engine for engine in (spec.model, spec.reference) if engine is not None]
    shapes = [load_shape(resolve_model_folder(engine.path)) for engine in engines]
    planners = [
        BatchPlanner.of_model(engine.mb_spec, spec.layout, shape) for engine, shape in zip(engines, shapes, strict=True)
    ]
    return Trainer(group, *planners)


def _models(
    recipe: Recipe,
    placement: Placement,
    specs: Mapping[str, TrainerSpec],
    groups: Mapping[str, WorkerGroup],
    waiting: WhileGenerating = ALWAYS_ON_DEVICE,
    *,
    verifies: bool = False,
) -> Models:
    """Return the handles of models whose processes have started.

    Args:
        recipe: the recipe.
        placement: the roles on their devices.
        specs: what the processes were built from, by role.
        groups: the processes, by role.
        waiting: how the actor waits while a rollout is awake on its devices.
        verifies: whether the actor's weights have checksums where they are sent.
    """
    roles = roles_of(recipe)
    in_turn = "rollout" in placement and "actor" in placement.sharers("rollout")
    actor = Actor(
        _trainer(groups["actor"], specs["actor"]),
        waiting.offloaded if in_turn else (),
        streams_frozen=waiting.streams_frozen,
        verifies=verifies,
    )
    further = {
        name: TrainedModel(
            _trainer(groups[name], spec), _turn(roles[name], placement, actor, waiting.offloaded or _asked(recipe))
        )
        for name, spec in specs.items()
        if name != "actor" and roles[name].trained is not None
    }
    hosted = {role.name: HostedModel(actor) for role in hosted_roles(roles, placement, "actor")}
    return Models(actor, further, {**_frozen(recipe, placement, specs, groups, actor), **hosted})


def _frozen(
    recipe: Recipe,
    placement: Placement,
    specs: Mapping[str, TrainerSpec],
    groups: Mapping[str, WorkerGroup],
    actor: Actor | None,
) -> dict[str, FrozenModel]:
    """Return the handles of frozen models in their own processes."""
    roles = roles_of(recipe)
    return {
        name: FrozenModel(_trainer(groups[name], spec), _turn(roles[name], placement, actor))
        for name, spec in specs.items()
        if roles[name].trained is None
    }


def _turn(role: Role, placement: Placement, actor: Actor | None, makes_room: tuple[Offloadable, ...] = ()) -> Turn:
    """Return when a role has its devices; `makes_room` is what the actor moves off those that it shares with it."""
    away, sharers = leaves(role, placement), set(placement.sharers(role.name)) - {"rollout"}
    if actor is None or not sharers:
        return Turn(away)
    return Turn(away, actor if "actor" in sharers else None, makes_room, actor.in_turn)


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
        trust_remote_code=recipe.trust_remote_code,
        chat=ChatTemplate.of(recipe),
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
        quantization=config.quantization,
        speculative=config.speculative,
        arguments=tuple(map(str, config.server_args)),
        max_restarts=config.max_server_restarts,
        server_timeout_s=config.server_timeout_s,
        new_tokens_per_chunk=config.new_tokens_per_chunk,
        keeps_cache=config.keeps_cache(is_server=layout.is_server),
        route=route,
        adapters=_served(recipe, path) if route.transport.serves_adapters else None,
        deterministic=recipe.actor.is_deterministic,
        needs_text=_needs_text(recipe),
        returns_routes=recipe.actor.router_replay == "rollout",
        sees=bool(image_keys(recipe)),
        most_pixels=most_pixels(recipe),
        environment=recipe.environment and recipe.environment.located(Path.cwd()),
    )


def _needs_text(recipe: TrainRecipe) -> bool:
    """Return whether completions may end at a text, which an agent may ask for too, or not at their end token."""
    sampling, environment = recipe.gconfig, recipe.environment
    has_agent = environment is not None and environment.agent is not None
    return bool(sampling.stop) or sampling.min_new_tokens > 0 or has_agent


def _served(recipe: TrainRecipe, path: str) -> ServedAdapters:
    """Return the actor's adapters as the servers of the model at `path` have them."""
    from fivefold.families.served import ServedAdapters  # here, because most runs have none

    return ServedAdapters.of(load_shape(resolve_model_folder(path)).with_lora(recipe.actor.lora))


def _longest(recipe: TrainRecipe) -> int:
    """Return the most tokens that a prompt and its completion may have together."""
    rows = [recipe.train_dataset, *recipe.held_out.values()]
    return max(map(recipe.most_tokens, rows))


def _copies_state(session: Session, recipe: Recipe, placement: Placement) -> bool:
    """Return whether trainers copy their state for a checkpoint: on GPUs, as the recipe or the plan says."""
    if not recipe.recover.is_enabled or recipe.recover.snapshot != "auto" or placement.is_cpu:
        return recipe.recover.snapshot != "blocking"
    return copies_state(recipe, _folders(recipe), gpu_memory=session.gpu_memory, host_memory=session.host_memory)


def _folders(recipe: Recipe) -> dict[str, Path]:
    """Return the local folder of each role's model."""
    return {
        name: resolve_model_folder(path) for name, path in {"actor": recipe.actor.path, **model_paths(recipe)}.items()
    }


def _while_generating(recipe: TrainRecipe, placement: Placement, gpu_memory: int | None) -> WhileGenerating:
    """Return how roles wait while one that generates is awake on their devices: as the plan says, on GPUs."""
    generating = [placed.role for placed in placement.roles if not placed.layout.is_training]
    sharers = {sharer for role in generating for sharer in placement.sharers(role)}
    if not sharers:
        return ALWAYS_ON_DEVICE
    if placement.is_cpu:
        return WhileGenerating({}, _asked(recipe) if "actor" in sharers else ())
    return while_generating(recipe, _folders(recipe), gpu_memory=gpu_memory)


def _asked(recipe: Recipe) -> tuple[Offloadable, ...]:
    """Return what the recipe itself says that the actor moves off its devices."""
    return tuple(kind for kind, leaves in recipe.actor.leaves_devices.items() if leaves)
