"""Every check of a recipe that needs neither data nor weights nor torch.

`fivefold plan` and the commands that train make the same checks, so that a recipe that is planned is not refused later
for something that could have been told at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from fivefold.config.paths import resolve_model_path
from fivefold.config.problems import RecipeError
from fivefold.config.roles import ROLES, roles_of, trained_models
from fivefold.config.schema.engine import EngineConfig
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.check import (
    RoleShapes,
    attention_problems,
    cache_problems,
    distillation_problems,
    engine_problems,
    graph_problems,
    layout_problems,
    reference_problems,
    replica_problems,
    sampling_problems,
    server_problems,
    vocabulary_problems,
)
from fivefold.families.fsdp_check import fsdp_problems
from fivefold.families.megatron_check import megatron_problems
from fivefold.families.shape import ModelShape
from fivefold.families.torch_dist import find_torch_dist
from fivefold.layout.allocation import RoleAllocation
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.placement import place
from fivefold.layout.recipe import recipe_allocation
from fivefold.rewards.static_check import reward_problems
from fivefold.weights.table import name_problems

NO_SHAPES: RoleShapes = MappingProxyType({})


def check_recipe(recipe: Recipe, shape: ModelShape, others: RoleShapes = NO_SHAPES) -> None:
    """Refuse a recipe that asks for what the models cannot do, or whose layouts do not fit the cluster or the models.

    Args:
        recipe: the recipe.
        shape: shape of the model at `actor.path`.
        others: shapes of the models that other roles have; a role that is missing has the actor's model.

    Raises:
        RecipeError: a line for each problem.
    """
    placement = place(recipe)
    layouts = {placed.role: placed.layout for placed in placement.roles}
    if "ref" in others:
        layouts.setdefault("ref", layouts["actor"])
    shapes = dict.fromkeys(layouts, shape) | dict(others)
    problems = [f"{role}: {line}" for role, layout in layouts.items() for line in layout_problems(layout, shapes[role])]
    problems += [*replica_problems(placement), *cache_problems(recipe, placement), *_profile_problems(recipe, layouts)]
    problems += recipe_problems(recipe, shape, others)
    if problems:
        raise RecipeError(recipe.experiment_name, problems)


def recipe_problems(recipe: Recipe, shape: ModelShape, others: RoleShapes) -> Iterator[str]:
    """Yield a line for each problem that does not depend on the number of devices, which a plan may still choose."""
    yield from engine_problems(recipe)
    yield from _attention_problems(recipe, shape, others)
    yield from _megatron_problems(recipe, shape, others)
    yield from _fsdp_problems(recipe)
    yield from server_problems(recipe)
    yield from vocabulary_problems(recipe, shape, others)
    yield from reference_problems(recipe, shape, others)
    yield from distillation_problems(recipe, shape)
    yield from graph_problems(recipe, shape)
    yield from sampling_problems(recipe, shape)
    if recipe.tokenizer_path is not None:
        try:
            resolve_model_path(recipe.tokenizer_path)
        except ValueError as error:
            yield f"tokenizer_path: {error}"
    for role, config in trained_models(recipe).items():
        if (checkpoint := config.megatron.dist_checkpointing_path) is not None:
            try:
                find_torch_dist(checkpoint)
            except ValueError as error:
                yield f"{role}.megatron.dist_checkpointing_path: {error}"
    if isinstance(recipe, TrainRecipe):
        yield from reward_problems(recipe.reward)
        yield from name_problems(recipe.rollout.weight_transport)


def _engines(recipe: Recipe) -> Iterator[tuple[RoleAllocation, EngineConfig]]:
    """Yield each role whose model has a section of its own, with the section."""
    rows = roles_of(recipe)
    for role in recipe_allocation(recipe).roles:
        section = rows[role.role].section
        if isinstance(section, EngineConfig):
            yield role, section


def _attention_problems(recipe: Recipe, shape: ModelShape, others: RoleShapes) -> Iterator[str]:
    """Yield a line for each role whose heads cannot have the kernels that its section asks for."""
    for role, section in _engines(recipe):
        yield from attention_problems(ROLES[role.role].key, section, others.get(role.role, shape))


def _megatron_problems(recipe: Recipe, shape: ModelShape, others: RoleShapes) -> Iterator[str]:
    """Yield a line for each key of a section `megatron` that the role's model or pipeline cannot take."""
    for role, section in _engines(recipe):
        if role.backend == "megatron":
            model, path = others.get(role.role, shape), ROLES[role.role].key
            yield from megatron_problems(path, section, model, role)


def _fsdp_problems(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each key of a section `fsdp` that the role's layout cannot take."""
    for role in recipe_allocation(recipe).roles:
        if role.backend != "fsdp":
            continue
        section = roles_of(recipe)[role.role].section
        if isinstance(section, EngineConfig):
            yield from fsdp_problems(ROLES[role.role].key, section.fsdp, role)
        else:  # a reference, which has the actor's options
            yield from (f"{role.role}: {line}" for line in fsdp_problems("actor", recipe.actor.fsdp, role))


def _profile_problems(recipe: Recipe, layouts: Mapping[str, ParallelLayout]) -> Iterator[str]:
    """Yield a line if a rank is to be recorded that no model that is trained has."""
    ranks = {role: layouts[role].world_size for role in trained_models(recipe)}
    most = max(ranks.values())
    strays = [rank for rank in recipe.profile.ranks if rank >= most]
    if recipe.profile.steps and strays:
        last = " and ".join(f"{size - 1} of the {role}" for role, size in ranks.items())
        yield f"profile.ranks has {strays[0]}, but the last rank is {last}: leave it out"
