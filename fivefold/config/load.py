"""Reading a recipe: YAML, overrides and interpolation in, one validated object or one complete list of problems out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from pydantic import ValidationError

from fivefold.config.problems import RecipeError, problems_of
from fivefold.config.schema import RunConfig, TrainRecipe
from fivefold.config.source import apply_overrides, read_mapping, resolve

__all__ = ["RecipeError", "load_recipe", "resolved_yaml"]

R = TypeVar("R", bound=RunConfig)


def load_recipe(path: str | Path, overrides: Sequence[str], schema: type[R]) -> R:
    """The recipe in `path`, with `a.b=c` overrides written over it, checked against `schema`.

    Raises:
        RecipeError: listing every problem at once, with key, value, rule and the nearest known key.
    """
    config = read_mapping(Path(path))
    problems = apply_overrides(config, overrides)
    values, unfilled = resolve(config, schema)
    if unfilled:
        raise RecipeError(str(path), problems + unfilled)
    try:
        recipe = schema.model_validate(values)
    except ValidationError as error:
        raise RecipeError(str(path), problems + problems_of(error, schema)) from error
    if problems:
        raise RecipeError(str(path), problems)
    return recipe


def resolved_yaml(recipe: RunConfig) -> str:
    """The whole recipe, defaults written out, as YAML that loads to an equal recipe."""
    values = recipe.model_dump()
    if isinstance(recipe, TrainRecipe) and recipe.allocation_mode is not None:
        # Backends that were not written come from `allocation_mode`; their defaults would contradict it.
        for section, written in (
            ("actor", recipe.actor.model_fields_set),
            ("rollout", recipe.rollout.model_fields_set),
        ):
            if "backend" not in written:
                del values[section]["backend"]
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(values)))


def _escaped(value: Any) -> Any:
    """Texts with a literal `${` escaped, so that loading does not take it for an interpolation."""
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value
