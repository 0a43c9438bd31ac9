"""Keys of a recipe that were set but change nothing, because of what other keys or the model say."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from fivefold.config.schema import Recipe, TrainRecipe
from fivefold.families.shape import ModelShape


def unused_keys(recipe: Recipe, shape: ModelShape) -> tuple[str, ...]:
    """Return a line for each key that differs from its default and has no effect. They are warnings, not errors.

    Args:
        recipe: the recipe.
        shape: shape of the model at `actor.path`.
    """
    return tuple(_unused_keys(recipe, shape))


def _unused_keys(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    if not shape.is_moe:
        reason = f"{shape.family} has no experts"
        yield from _differing("actor.megatron", recipe.actor.megatron, ("router_dtype", "token_dispatcher"), reason)
    if not isinstance(recipe, TrainRecipe):
        return
    actor = recipe.actor
    if actor.kl_ctl == 0:
        yield from _differing("actor", actor, ("kl_in", "kl_estimator"), "actor.kl_ctl is 0")
    if actor.reward_norm.std_level == "none":
        reason = "actor.reward_norm.std_level is none"
        yield from _differing("actor.reward_norm", actor.reward_norm, ("eps",), reason)


def _differing(path: str, section: BaseModel, names: tuple[str, ...], reason: str) -> Iterator[str]:
    for name in names:
        if (value := getattr(section, name)) != type(section).model_fields[name].default:
            yield f"{path}.{name}={value} has no effect: {reason}"
