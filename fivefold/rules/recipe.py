"""Every rule of a recipe that needs neither data nor weights nor torch, for plans and for training alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from fivefold.config.paths import resolve_model_path
from fivefold.config.problems import RecipeError
from fivefold.config.roles import trained_models
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.shape import ModelShape
from fivefold.families.torch_dist import find_torch_dist
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.placement import Placement, place
from fivefold.rewards.static_check import reward_problems
from fivefold.rules.adapters import adapter_problems
from fivefold.rules.engines import engine_problems
from fivefold.rules.freezing import freezing_problems
from fivefold.rules.judge import judge_problems, judge_turn_problems
from fivefold.rules.layouts import layout_problems, replica_problems
from fivefold.rules.models import (
    RoleShapes,
    distillation_problems,
    reference_problems,
    sampling_problems,
    vocabulary_problems,
)
from fivefold.rules.replay import replay_problems
from fivefold.rules.rollout import (
    cache_problems,
    graph_problems,
    quantization_problems,
    server_problems,
    speculative_problems,
    sync_problems,
)
from fivefold.rules.served_adapters import served_problems
from fivefold.rules.vision import image_layout_problems, image_problems
from fivefold.weights.table import transport_problems

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
    problems += [
        *replica_problems(placement),
        *(_turn_problems(recipe, placement) if isinstance(recipe, TrainRecipe) else ()),
        *_profile_problems(recipe, layouts),
        *image_layout_problems(recipe, layouts, shapes),
    ]
    problems += recipe_problems(recipe, shape, others)
    if problems:
        raise RecipeError(recipe.experiment_name, problems)


def recipe_problems(recipe: Recipe, shape: ModelShape, others: RoleShapes) -> Iterator[str]:
    """Yield a line for each problem that does not depend on the number of devices, which a plan may still choose."""
    yield from engine_problems(recipe, shape, others)
    yield from vocabulary_problems(recipe, shape, others)
    yield from adapter_problems(recipe, shape, others)
    yield from freezing_problems(recipe, shape, others)
    yield from image_problems(recipe, shape, others)
    yield from _path_problems(recipe)
    if isinstance(recipe, TrainRecipe):
        yield from _train_problems(recipe, shape, others)


def _train_problems(recipe: TrainRecipe, shape: ModelShape, others: RoleShapes) -> Iterator[str]:
    """Yield a line for each problem of what generates, judges and trains on completions."""
    yield from server_problems(recipe)
    yield from judge_problems(recipe, others)
    yield from quantization_problems(recipe)
    yield from speculative_problems(recipe)
    yield from reference_problems(recipe, shape, others)
    yield from distillation_problems(recipe, shape)
    yield from graph_problems(recipe, shape)
    yield from sampling_problems(recipe, shape)
    yield from replay_problems(recipe, shape)
    yield from reward_problems(recipe.reward)
    yield from transport_problems(recipe)
    yield from served_problems(recipe, shape)


def _turn_problems(recipe: TrainRecipe, placement: Placement) -> Iterator[str]:
    """Yield a line for each role that keeps something on devices that it gives to others in turn."""
    yield from cache_problems(recipe, placement)
    yield from sync_problems(recipe, placement)
    yield from judge_turn_problems(recipe, placement)


def _path_problems(recipe: Recipe) -> Iterator[str]:
    """Yield a line for each path of a tokenizer or a checkpoint that leads nowhere."""
    paths: list[tuple[str, str | None, Callable[[str], object]]] = [
        ("tokenizer_path", recipe.tokenizer_path, resolve_model_path)
    ]
    for role, config in trained_models(recipe).items():
        key, path = f"{role}.megatron.dist_checkpointing_path", config.megatron.dist_checkpointing_path
        paths.append((key, path, find_torch_dist))
    for key, path, find in paths:
        if path is not None:
            try:
                find(path)
            except ValueError as error:
                yield f"{key}: {error}"


def _profile_problems(recipe: Recipe, layouts: Mapping[str, ParallelLayout]) -> Iterator[str]:
    """Yield a line if a rank is to be recorded that no model that is trained has."""
    ranks = {role: layouts[role].world_size for role in trained_models(recipe)}
    most = max(ranks.values())
    strays = [rank for rank in recipe.profile.ranks if rank >= most]
    if recipe.profile.steps and strays:
        last = " and ".join(f"{size - 1} of the {role}" for role, size in ranks.items())
        yield f"profile.ranks has {strays[0]}, but the last rank is {last}: leave it out"
