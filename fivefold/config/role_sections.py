"""The section of a recipe that each role has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fivefold.config.schema.engine import FrozenModelConfig
from fivefold.config.schema.fields import Section
from fivefold.config.schema.preferences import DPORecipe
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.roles import FrozenReferenceConfig
from fivefold.config.schema.train import TrainRecipe

S = TypeVar("S", bound=Section)

ROLE_SECTIONS: Mapping[str, str] = {
    "rollout": "rollout",
    "actor": "actor",
    "ref": "ref",
    "critic": "critic",
    "reward": "reward.model",
    "teacher": "teacher",
}
"""Dotted key of the section of each role that a recipe can lay out."""
FROZEN_ROLES = ("reward", "teacher")
"""Roles whose section is a `FrozenModelConfig`."""


def role_section(recipe: Recipe, role: str) -> Section | None:
    """Return the section of a role; None if the recipe has none."""
    section: Section | None = recipe
    for name in ROLE_SECTIONS[role].split("."):
        section = getattr(section, name) if section is not None and name in type(section).model_fields else None
    return section


def frozen_models(recipe: Recipe) -> dict[str, FrozenModelConfig]:
    """Return the section of each model of the recipe that has processes of its own and is not trained, by role.

    The reference, whose section is another one, is not among them.
    """
    sections = {role: role_section(recipe, role) for role in FROZEN_ROLES}
    return {role: section for role, section in sections.items() if isinstance(section, FrozenModelConfig)}


def reference_section(recipe: Recipe) -> FrozenReferenceConfig | None:
    """Return the section of the recipe's reference; None if there is no such model, because nothing compares with it.

    A TrainRecipe's is a `ReferenceConfig`.
    """
    if isinstance(recipe, DPORecipe):
        return recipe.ref
    return recipe.ref if isinstance(recipe, TrainRecipe) and recipe.actor.kl_ctl > 0 else None


def model_paths(recipe: Recipe) -> dict[str, str]:
    """Return the path of each model besides the actor's, by role; without `ref.path` the reference has the actor's."""
    sections = {role: role_section(recipe, role) for role in ROLE_SECTIONS if role not in ("actor", "rollout")}
    paths = {role: vars(section)["path"] for role, section in sections.items() if section is not None}
    return {role: path for role, path in paths.items() if path is not None}


def with_paths(recipe: S, paths: Mapping[str, str]) -> S:
    """Return a recipe in which the models of the roles in `paths` have other paths."""
    for role, path in paths.items():
        recipe = _with(recipe, [*ROLE_SECTIONS[role].split("."), "path"], path)
    return recipe


def _with(section: S, names: list[str], value: object) -> S:
    """Return a section in which the key of these names has another value."""
    first, *rest = names
    return section.model_copy(update={first: _with(getattr(section, first), rest, value) if rest else value})
