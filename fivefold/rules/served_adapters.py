"""Rules of adapters that a server has next to its weights: what its engine cannot serve."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.config.schema.train import TrainRecipe
from fivefold.families.served import ServedAdapters
from fivefold.families.shape import ModelShape
from fivefold.layout.backends import BACKENDS, Backend
from fivefold.layout.recipe import recipe_allocation
from fivefold.weights.served_adapter import ServedAdapter

FOLDED = "kv_b_proj"
"""The layer of latent attention that vLLM multiplies into others: adapters next to it would change nothing."""


def served_problems(recipe: TrainRecipe, shape: ModelShape) -> Iterator[str]:
    """Yield a line for each reason why the rollout's server cannot have the actor's adapters next to its weights."""
    asked = recipe.rollout.weight_transport
    engine = next(BACKENDS[role.backend] for role in recipe_allocation(recipe).roles if role.role == "rollout")
    adapted = shape.with_lora(recipe.actor.lora)
    if asked != ServedAdapter.name or recipe.actor.lora is None or not engine.is_server:
        return
    key = f"rollout.weight_transport={asked}"
    if engine.adapted_families is not None and shape.family not in engine.adapted_families:
        yield (
            f"{key}: {engine.title} does not serve all adapters of {shape.family}, but of "
            f"{', '.join(sorted(engine.adapted_families))}: use auto"
        )
    elif engine.name == "sglang" and shape.is_moe and not all(shape.moe_layers):
        yield f"{key}: SGLang has no adapters of dense MLPs in a model with experts, which {shape.family} has: use auto"
    yield from _layer_problems(key, engine, ServedAdapters.of(adapted), adapted)


def _layer_problems(key: str, engine: Backend, adapters: ServedAdapters, shape: ModelShape) -> Iterator[str]:
    if engine.adapter_ranks and adapters.rank > engine.adapter_ranks[-1]:
        yield (
            f"{key}: {engine.title} serves adapters of ranks up to {engine.adapter_ranks[-1]}, and the actor's have "
            f"{adapters.rank}: lower actor.lora.rank, or use auto"
        )
    if engine.name == "vllm" and FOLDED in adapters.projections:
        others = ", ".join(name for name in adapters.projections if name != FOLDED)
        yield (
            f"{key}: vLLM folds {FOLDED} of {shape.family} into other matrices, where its adapters are lost: use auto, "
            f"or set actor.lora.targets=[{others}]"
        )
