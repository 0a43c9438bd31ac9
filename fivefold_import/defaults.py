"""What a framework's table of defaults is written with, and the recipe's own defaults.

Each framework's `defaults` module has the values that the framework takes for keys that a source does not write: one
for every key that its rules map. A default that is also Fivefold's is not written into the recipe; any other is, and
the report lists it. The values are those of the frameworks' newest releases.

    "trainer.total_epochs": 30,                    # the framework's default
    "data.seed": None,                             # no value: what follows from the data, the engine or the recipe
    "actor.megatron.moe_router_dtype": UNKNOWN,    # not known here: a note says that Fivefold's default holds
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel

from fivefold.config.keys import section_of
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.train import TrainRecipe

UNKNOWN: Final[Any] = object()
"""Stands in a table for a default that is not known here."""


def own_default(key: str, schema: type[Recipe] = TrainRecipe) -> Any:
    """Return the default of a recipe's dotted key; None if there is none."""
    section: type[BaseModel] | None = schema
    *sections, name = key.split(".")
    for part in sections:
        field = section.model_fields.get(part) if section is not None else None
        section = section_of(field.annotation) if field is not None else None
    field = section.model_fields.get(name) if section is not None else None
    return None if field is None or field.is_required() else field.default


def none(*keys: str) -> dict[str, Any]:
    """Return a table that says that the framework has no value for `keys`."""
    return dict.fromkeys(keys)
