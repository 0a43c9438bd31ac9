"""Rules of router replay: what it needs of the model, and of the engines of both roles; and what `auto` takes."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.config.schema.train import TrainRecipe
from fivefold.families.shape import ModelShape
from fivefold.layout.recipe import recipe_allocation


def with_replay(recipe: TrainRecipe, shape: ModelShape) -> TrainRecipe:
    """Return the recipe with what `actor.router_replay=auto` takes for a model; any other recipe as it is."""
    if recipe.actor.router_replay != "auto":
        return recipe
    replay = "none" if next(_obstacles(recipe, shape, "rollout"), None) else "rollout"
    return recipe.model_copy(update={"actor": recipe.actor.model_copy(update={"router_replay": replay})})


def replay_taken(recipe: TrainRecipe, shape: ModelShape) -> str | None:
    """Return what the banner says about router replay; None: nothing, because it was not asked for."""
    match recipe.actor.router_replay:
        case "none":
            return None
        case "auto":
            obstacle = next(_obstacles(recipe, shape, "rollout"), None)
            return "rollout (auto)" if obstacle is None else f"none (auto): {obstacle[0]}"
    return recipe.actor.router_replay


def replay_problems(recipe: TrainRecipe, shape: ModelShape) -> Iterator[str]:
    """Yield a line for each thing that keeps routes from being recorded or replayed."""
    if recipe.actor.router_replay not in ("none", "auto"):
        key = f"actor.router_replay={recipe.actor.router_replay}"
        for obstacle, fix in _obstacles(recipe, shape, recipe.actor.router_replay):
            yield f"{key}: {obstacle}: {fix}"


def _obstacles(recipe: TrainRecipe, shape: ModelShape, replay: str) -> Iterator[tuple[str, str]]:
    """Yield each thing that keeps routes from being recorded or replayed, and how to remove it."""
    if not shape.is_moe:
        yield "the model has no experts", "drop it"
        return
    roles = {role.role: role for role in recipe_allocation(recipe).roles}
    if roles["actor"].backend == "megatron" and recipe.actor.megatron.transformer.moe_router_force_load_balancing:
        yield (
            "actor.megatron.transformer.moe_router_force_load_balancing=true sends tokens to random experts",
            "drop one of them",
        )
    rollout = roles["rollout"]
    if replay == "rollout" and recipe.rollout.speculative is not None:
        yield (
            "servers tell the experts of drafted tokens too, with rollout.speculative",
            "drop rollout.speculative, or set actor.router_replay to old_logprobs",
        )
    if replay == "rollout" and rollout.backend == "vllm" and rollout.pp > 1:
        yield (
            "vLLM returns no routes with pipeline stages",
            "lay the rollout out with t in place of p, or set actor.router_replay to old_logprobs",
        )
