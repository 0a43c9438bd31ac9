"""Loads a recipe: YAML, overrides and interpolations become one validated object, or one list of all problems."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from difflib import SequenceMatcher
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from fivefold.config.keys import known_keys, nearest_keys
from fivefold.config.other_names import looks_like
from fivefold.config.problems import MOST_PROBLEMS, RecipeError, problems_of, unknown_keys
from fivefold.config.schema.preferences import DPORecipe, RMRecipe
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.run import RunConfig
from fivefold.config.schema.sft import SFTRecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.config.source import apply_overrides, read_mapping, resolve
from fivefold.config.yaml_reader import write_yaml

R = TypeVar("R", bound=RunConfig)


def load_recipe(path: str | Path, overrides: Sequence[str], schema: type[R]) -> R:
    """Load the recipe in `path`, apply `a.b=c` overrides, and check the result against `schema`.

    Raises:
        RecipeError: a recipe with problems. It lists all of them, each with key, value, rule and the nearest known key.
    """
    written, problems = apply_overrides(read_mapping(Path(path)), overrides)
    return _checked(str(path), written, problems, schema)


def load_any_recipe(path: str | Path, overrides: Sequence[str]) -> Recipe:
    """Load a recipe like `load_recipe`, against the schema that its keys belong to (see `kind_of`).

    Raises:
        RecipeError: see `load_recipe`.
    """
    written, problems = apply_overrides(read_mapping(Path(path)), overrides)
    return _checked(str(path), written, problems, kind_of(written))


def recipe_of(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of nested mappings, of the kind that its keys belong to (see `kind_of`).

    Raises:
        RecipeError: see `load_recipe`.
    """
    written, problems = apply_overrides(deepcopy(dict(values)), overrides)
    return _checked("the recipe", written, problems, kind_of(written))


def kind_of(values: dict[str, Any]) -> type[Recipe]:
    """Return the schema that the keys of a recipe belong to.

    A recipe of `fivefold train` has at least one key, perhaps misspelled, that no other kind of recipe has. Any other
    is of the kind that has the most of its keys. A recipe that several commands could read is taken for one of
    `fivefold sft` before `fivefold rm` before `fivefold dpo`; reinforcement learning with defaults alone is rare.
    """
    kinds: tuple[type[Recipe], ...] = (SFTRecipe, RMRecipe, DPORecipe)
    known = {kind: set(known_keys(kind)) for kind in (TrainRecipe, *kinds)}
    others = set().union(*(known[kind] for kind in kinds))
    written = list(_keys(values))
    unknown = [key for key in written if key not in known[TrainRecipe] and key not in others][:MOST_PROBLEMS]
    # A key of the same name in another section says nothing: several kinds have keys of one name.
    meant = {near for key in unknown for near in nearest_keys(key, TrainRecipe) if _section(near) == _section(key)}
    if {*written, *meant} & (known[TrainRecipe] - others):
        return TrainRecipe
    return max(kinds, key=lambda kind: len(known[kind].intersection(written)) + _likeness(unknown, kind))


def _section(key: str) -> str:
    return key.rpartition(".")[0]


def _likeness(keys: Sequence[str], kind: type[Recipe]) -> float:
    """Return how much misspelled keys are like keys of `kind`: for each, from 0 to 1."""
    near = ((key, nearest_keys(key, kind)) for key in keys)
    return sum(max((SequenceMatcher(None, key, one).ratio() for one in ones), default=0.0) for key, ones in near)


def _keys(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of all keys in `value`, sections included."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield f"{prefix}{name}"
        yield from _keys(inner, f"{prefix}{name}.")


def _checked(source: str, written: dict[str, Any], problems: list[str], schema: type[R]) -> R:
    """Return what was read as an object of `schema`; `problems` are those found while reading."""
    values, unfilled = resolve(written, schema)
    if unfilled:
        raise RecipeError(source, problems + unfilled)
    try:
        recipe = schema.model_validate(values)
    except ValidationError as error:
        raise RecipeError(source, problems + _listed(error, schema)) from error
    if problems:
        raise RecipeError(source, problems)
    return recipe


def _listed(error: ValidationError, schema: type[RunConfig]) -> list[str]:
    """Return the first problems, and how many more there are: to look up the nearest key of thousands takes long."""
    lines = list(islice(problems_of(error, schema), MOST_PROBLEMS))
    more = error.error_count() - len(lines)
    guess = looks_like(unknown_keys(error))
    return [
        *([guess] if guess else []),
        *dict.fromkeys(lines),
        *([f"and {more:,} more problems"] if more else []),
    ]


def resolved_yaml(recipe: RunConfig) -> str:
    """Return the whole recipe, with its defaults, as YAML that loads to an equal recipe."""
    values = recipe.model_dump()
    if isinstance(recipe, TrainRecipe) and recipe.allocation_mode is not None:
        # Backends that the recipe does not set come from `allocation_mode`; their defaults would contradict it.
        for section, written in (
            ("actor", recipe.actor.model_fields_set),
            ("rollout", recipe.rollout.model_fields_set),
        ):
            if "backend" not in written:
                del values[section]["backend"]
    return write_yaml(_escaped(values))


def _escaped(value: Any) -> Any:
    """Escape every literal `${`, and the backslashes before it, so that loading does not read an interpolation."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value
