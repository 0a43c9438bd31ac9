"""The values in Megatron-Core's configuration that a recipe changes from their defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from fivefold.config.roles import trained_models
from fivefold.config.schema.recipe import Recipe
from fivefold.families.megatron_settings import changed_values, megatron_fields
from fivefold.families.read import find_shape
from fivefold.layout.placement import place

Changed = dict[str, dict[str, dict[str, Any]]]
"""Role -> Megatron-Core's class -> field -> value."""


def effective_configs(recipe: Recipe) -> Changed:
    """Return the values that differ from Megatron-Core's defaults, for each role trained on Megatron-Core.

    Raises:
        ValueError: layouts that contradict one another, an unknown model, or no role on Megatron-Core.
    """
    placement, models = place(recipe), trained_models(recipe)
    layouts = {role: placement[role].layout for role in models}
    if all(layout.backend != "megatron" for layout in layouts.values()):
        raise ValueError("no role of this recipe runs on Megatron-Core, and --effective shows its configuration")
    shapes = {role: find_shape(model.path).with_head(model.head) for role, model in models.items()}
    return {
        role: changed_values(model, model.optimizer, layouts[role], shapes[role], on_gpu=not placement.is_cpu)
        for role, model in models.items()
        if layouts[role].backend == "megatron"
    }


def effective_text(configs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return the values as YAML, with each field's default in a comment."""
    return "\n".join(_lines(configs)) + "\n"


def _lines(configs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[str]:
    for role, classes in configs.items():
        yield f"{role}:"
        for name, values in classes.items():
            yield f"  {name}:" if values else f"  {name}: {{}}"
            defaults = megatron_fields()[name]
            for field, value in sorted(values.items()):
                yield f"    {field}: {_written(value)}  # default: {_written(defaults[field]['default'])}"


def _written(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("\n").removesuffix("\n...")
