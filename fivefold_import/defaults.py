"""Defaults: the recipe's own ones, and what stands for a framework's default that is not known.

A framework's default that is also Fivefold's is not written into the recipe; any other is, and the report lists it.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel

from fivefold.config.keys import section_of
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.train import TrainRecipe

UNKNOWN: Final[Any] = object()
"""A default that is not known here: a note says that Fivefold's holds."""


def own_default(key: str, schema: type[Recipe] = TrainRecipe) -> Any:
    """Return the default of a recipe's dotted key; None if there is none."""
    section: type[BaseModel] | None = schema
    *sections, name = key.split(".")
    for part in sections:
        field = section.model_fields.get(part) if section is not None else None
        section = section_of(field.annotation) if field is not None else None
    field = section.model_fields.get(name) if section is not None else None
    return None if field is None or field.is_required() else field.default
