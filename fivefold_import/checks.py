"""Checks of a finished recipe: what `fivefold plan` and `fivefold train` would refuse, reported at the import."""

from __future__ import annotations

from fivefold.config.paths import user_path
from fivefold.config.problems import RecipeError
from fivefold.config.roles import model_paths
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.read import find_shape
from fivefold.families.shape import ModelShape
from fivefold.layout.placement import place
from fivefold.rules.layouts import replica_problems
from fivefold.rules.recipe import check_recipe
from fivefold.rules.rollout import server_problems
from fivefold_import.models import is_unread


def problems_of_recipe(recipe: Recipe) -> list[str]:
    """Return a line for each problem that can be found without data, weights or GPUs.

    Where the model's sizes are not known, the checks that need them are left out.
    """
    try:
        shape = _shape(recipe.actor.path)
        others = {role: found for role, path in model_paths(recipe).items() if (found := _shape(path)) is not None}
        if shape is not None:
            check_recipe(recipe, shape, others)
            return []
        problems = [*_unread(recipe.actor.path), *replica_problems(place(recipe))]
        return [*problems, *server_problems(recipe)] if isinstance(recipe, TrainRecipe) else problems
    except RecipeError as error:
        return list(error.problems)
    except ValueError as error:
        return [str(error)]


def _unread(model: str) -> list[str]:
    if not is_unread(model):
        return []
    return [f"actor.path={model}: Fivefold has no family with this model's layers, so it is not trained: name another"]


def _shape(model: str) -> ModelShape | None:
    """Return the shape of a model; None if nothing of that name is known here.

    Raises:
        ValueError: the model is a folder or a file, and cannot be read.
    """
    try:
        return find_shape(model)
    except ValueError:
        if user_path(model).exists():
            raise
        return None
