"""What the processes of each role are built from, row by row (config/roles.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fivefold.bridge.hf_reader import resolve_model_folder
from fivefold.bridge.value_head import with_stored_head
from fivefold.config.paths import resolve_model_path
from fivefold.config.roles import Role, is_base_of_host, roles_of
from fivefold.config.schema.engine import EngineConfig
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.roles import FrozenReferenceConfig
from fivefold.engine.contract import EngineOptions, Offloadable
from fivefold.families.read import load_shape
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import Trained
from fivefold.families.torch_dist import find_torch_dist
from fivefold.layout.placement import Placement
from fivefold.roles.trainer_worker import TrainerSpec


def trainer_specs(recipe: Recipe, placement: Placement, n_steps: int, *, copies: bool = True) -> dict[str, TrainerSpec]:
    """Return what the processes of each role with a training engine are built from, by role.

    Args:
        recipe: the recipe.
        placement: the roles on their devices. A role that lives in another's processes is in the spec of those.
        n_steps: training steps of the whole run.
        copies: whether the processes copy their state to host memory for a checkpoint.
    """
    roles = {name: role for name, role in roles_of(recipe).items() if not role.spec.generates}
    specs = {}
    for name, role in roles.items():
        if name in placement:
            specs[name] = _spec(recipe, role, placement, updates=_updates(roles, name, n_steps), copies=copies)
            for guest in hosted_roles(roles, placement, name):
                specs[name] = _with_guest(specs[name], recipe, guest, placement)
    return specs


def hosted_roles(roles: Mapping[str, Role], placement: Placement, host: str) -> list[Role]:
    """Return the roles that live in the processes of `host`, because they are not placed themselves."""
    return [role for name, role in roles.items() if role.spec.host == host and name not in placement]


def leaves(role: Role, placement: Placement) -> tuple[Offloadable, ...]:
    """Return what a role moves off its devices while it does not work: by default all, on GPUs that it shares."""
    is_shared = role.name in placement and bool(placement.sharers(role.name)) and not placement.is_cpu
    wanted = role.section.leaves_devices
    return tuple(kind for kind, leaves in wanted.items() if (is_shared if leaves is None else leaves))


def model_shape(recipe: Recipe, role: Role) -> ModelShape:
    """Return the shape of a role's model, with the head that it has or gets.

    Raises:
        ValueError: a model that is missing or not supported, or whose weight files lack the head that it needs.
    """
    folder = resolve_model_folder(role.path or recipe.actor.path)
    shape, head = load_shape(folder), role.section.head
    return with_stored_head(shape, folder) if head == "stored" else shape.with_head(head)


def engine_config(config: EngineConfig) -> EngineConfig:
    """Return the engine's options of a role's section, with full paths of the model and its checkpoint."""
    fields = {name: getattr(config, name) for name in EngineConfig.model_fields}
    if (checkpoint := config.megatron.dist_checkpointing_path) is not None:
        # Resolved once: workers have other working folders, and a newer checkpoint may be written meanwhile.
        place = {"dist_checkpointing_path": str(find_torch_dist(checkpoint).resolve())}
        fields["megatron"] = config.megatron.model_copy(update=place)
    return EngineConfig(**{**fields, "path": resolve_model_path(config.path)})


def _spec(recipe: Recipe, role: Role, placement: Placement, *, updates: int, copies: bool) -> TrainerSpec:
    trained, shape = role.trained, model_shape(recipe, role)
    return TrainerSpec(
        model=_engine(recipe, role),
        layout=placement[role.name].layout,
        options=EngineOptions(
            seed=recipe.seed,
            optimizer=None if trained is None else trained.optimizer,
            total_steps=updates,
            timeout_s=recipe.scheduler.timeout_s,
            value_head=shape.value_head,
            value_bias=shape.value_bias,
            trained=Trained(() if trained is None else tuple(trained.freeze)),
            replays=role.section.replays,
            adapters=shape.trained_by(trained).adapters,
        ),
        tokenizer=None if trained is None else resolve_model_path(recipe.tokenizer_path or recipe.actor.path),
        ema_decay=role.section.follows,
        copies_state=copies,
    )


def _with_guest(host: TrainerSpec, recipe: Recipe, guest: Role, placement: Placement) -> TrainerSpec:
    """Return the spec of processes that hold a frozen model too."""
    if is_base_of_host(recipe, guest):
        return replace(host, reference_is_base=True)
    return replace(
        host,
        reference=_engine(recipe, guest),
        offloads_reference=bool(leaves(guest, placement)),
        ema_decay=guest.section.follows,
    )


def _updates(roles: Mapping[str, Role], name: str, n_steps: int) -> int:
    """Return the optimizer steps that a role makes in so many training steps."""
    trained = {other: role.trained for other, role in roles.items() if role.trained is not None}
    if name not in trained:
        return 1
    alone = max((section.steps_alone for other, section in trained.items() if other != name), default=0)
    return max(1, n_steps - alone) * trained[name].updates_per_step


def _engine(recipe: Recipe, role: Role) -> EngineConfig:
    """Return the options of a role's engine. A reference has the actor's, but for those that it names itself."""
    section = role.section
    if isinstance(section, EngineConfig):
        return engine_config(section)
    assert isinstance(section, FrozenReferenceConfig), f"{role.name} has no training engine"
    actor = engine_config(recipe.actor)
    changes = {name: value for name in ("dtype", "mb_spec") if (value := getattr(section, name)) is not None}
    if section.path is not None:
        own_weights = {"use_dist_checkpointing": False, "dist_checkpointing_path": None}
        changes |= {
            "path": resolve_model_path(section.path),
            "init_from_scratch": False,
            "megatron": actor.megatron.model_copy(update=own_weights),
        }
    return actor.model_copy(update=changes)
