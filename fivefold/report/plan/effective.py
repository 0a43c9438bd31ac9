"""The values in Megatron-Core's configuration that a recipe changes from their defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from fivefold.config.schema.engine import EngineConfig
from fivefold.config.schema.preferences import RMRecipe
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.megatron_settings import changed_values, megatron_fields
from fivefold.families.read import find_shape
from fivefold.families.shape import ModelShape
from fivefold.layout.placement import place

Changed = dict[str, dict[str, dict[str, Any]]]
"""Role -> Megatron-Core's class -> field -> value."""


def effective_configs(recipe: Recipe) -> Changed:
    """Return the values that differ from Megatron-Core's defaults, for each role trained on Megatron-Core.

    Raises:
        ValueError: layouts that contradict one another, an unknown model, or no role on Megatron-Core.
    """
    placement = place(recipe)
    actor = find_shape(recipe.actor.path)
    trained = actor.as_reward_model() if isinstance(recipe, RMRecipe) else actor
    models: dict[str, tuple[EngineConfig, ModelShape]] = {"actor": (recipe.actor, trained)}
    optimizers = {"actor": recipe.actor.optimizer}
    if isinstance(recipe, TrainRecipe) and recipe.critic is not None:
        models["critic"] = recipe.critic, find_shape(recipe.critic.path).as_critic()
        optimizers["critic"] = recipe.critic.optimizer
    layouts = {role: placement[role].layout for role in models}
    if all(layout.backend != "megatron" for layout in layouts.values()):
        raise ValueError("no role of this recipe runs on Megatron-Core, and --effective shows its configuration")
    return {
        role: changed_values(config, optimizers[role], layouts[role], shape, on_gpu=not placement.is_cpu)
        for role, (config, shape) in models.items()
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
