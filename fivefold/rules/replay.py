"""Rules of router replay: what it needs of the model, and of the engines of both roles."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.shape import ModelShape
from fivefold.layout.recipe import recipe_allocation


def replay_problems(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield a line for each thing that keeps routes from being recorded or replayed."""
    if not isinstance(recipe, TrainRecipe) or recipe.actor.router_replay == "none":
        return
    key = f"actor.router_replay={recipe.actor.router_replay}"
    if not shape.is_moe:
        yield f"{key} replays the experts of tokens, and the model has none: drop it"
        return
    roles = {role.role: role for role in recipe_allocation(recipe).roles}
    if roles["actor"].backend == "megatron" and recipe.actor.megatron.transformer.moe_router_force_load_balancing:
        yield (
            f"{key} has no effect with actor.megatron.transformer.moe_router_force_load_balancing=true, which sends "
            "tokens to random experts: drop one of them"
        )
    rollout = roles["rollout"]
    if recipe.actor.router_replay == "rollout" and rollout.backend == "vllm" and rollout.pp > 1:
        yield (
            f"{key} needs vLLM to return routes, which it cannot with pipeline stages: lay the rollout out with t in "
            "place of p, or set actor.router_replay to old_logprobs"
        )
