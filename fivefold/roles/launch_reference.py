"""Starts the reference: beside the actor in its processes, or alone in processes of its own."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold.cluster.group import WorkerGroup
from fivefold.config.paths import resolve_model_path
from fivefold.config.role_sections import reference_section
from fivefold.config.schema.engine import EngineConfig
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.roles import FrozenReferenceConfig, ReferenceConfig
from fivefold.engine.contract import PARAMS, Offloadable
from fivefold.layout.placement import Placement
from fivefold.roles.actor import Actor
from fivefold.roles.frozen import FrozenModel
from fivefold.roles.reference import Reference, ReferenceAlone, ReferenceBesideActor
from fivefold.roles.trainer_roles import trainer_of
from fivefold.roles.trainer_worker import TrainerSpec


def reference_beside(recipe: Recipe, placement: Placement, model: EngineConfig) -> EngineConfig | None:
    """Return the engine's options of a reference in the actor's processes; None: they hold none.

    Args:
        recipe: the recipe.
        placement: the roles on their devices.
        model: the options of the actor's engine.
    """
    section = reference_section(recipe)
    return None if section is None or "ref" in placement else _engine_options(section, model)


def reference_alone(recipe: Recipe, placement: Placement, model: EngineConfig, *, copies: bool) -> TrainerSpec | None:
    """Return the spec of the processes of a reference that has its own; None: there is no such reference.

    Args:
        recipe: the recipe.
        placement: the roles on their devices.
        model: the options of the actor's engine.
        copies: whether the processes copy their state to host memory for a checkpoint.
    """
    section = reference_section(recipe)
    if section is None or "ref" not in placement:
        return None
    return TrainerSpec(
        model=_engine_options(section, model),
        layout=placement["ref"].layout,
        seed=recipe.seed,
        timeout_s=recipe.scheduler.timeout_s,
        ema_decay=ema_decay(recipe),
        copies_state=copies,
    )


def offloaded_reference(recipe: Recipe) -> tuple[Offloadable, ...]:
    """Return what the reference moves off its devices while it does not work."""
    section = reference_section(recipe)
    return PARAMS if section is not None and section.offload else ()


def ema_decay(recipe: Recipe) -> float | None:
    """Return the decay with which the reference follows the actor, 0 for copies; None: it does not follow."""
    section = reference_section(recipe)
    if not isinstance(section, ReferenceConfig) or section.refresh_steps is None:
        return None
    return section.ema_decay or 0.0


def reference_of(
    recipe: Recipe, groups: Mapping[str, WorkerGroup], actor: Actor, alone: TrainerSpec | None, placement: Placement
) -> Reference | None:
    """Return the handle of the reference, whose processes have started; None: the recipe has none.

    Args:
        recipe: the recipe.
        groups: the processes of each role.
        actor: the actor.
        alone: the spec of the reference's own processes; None: it is in the actor's.
        placement: the roles on their devices.
    """
    if reference_section(recipe) is None:
        return None
    if alone is None:
        return ReferenceBesideActor(actor.trainer)
    shares = "actor" in placement.sharers("ref")
    model = FrozenModel(
        trainer_of(groups["ref"], alone),
        is_offloaded=bool(offloaded_reference(recipe)),
        actor=actor if shares else None,
    )
    return ReferenceAlone(model)


def _engine_options(section: FrozenReferenceConfig, model: EngineConfig) -> EngineConfig:
    """Return the engine's options of the untrained actor, or of the model of `ref.path`, always with its weights."""
    changes = {name: value for name in ("dtype", "mb_spec") if (value := getattr(section, name)) is not None}
    if section.path is not None:
        own_weights = {"use_dist_checkpointing": False, "dist_checkpointing_path": None}
        changes |= {
            "path": resolve_model_path(section.path),
            "init_from_scratch": False,
            "megatron": model.megatron.model_copy(update=own_weights),
        }
    return model.model_copy(update=changes)
