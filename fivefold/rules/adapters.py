"""Rules of low-rank adapters: what they need of the engine and of the model."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.config.paths import user_path
from fivefold.config.roles import ROLES, roles_of
from fivefold.config.schema.engine import TrainedModelConfig
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.adapters import CONFIG, layer_of
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import tensors
from fivefold.layout.recipe import recipe_allocation
from fivefold.rules.models import RoleShapes


def adapter_problems(recipe: Recipe, shape: ModelShape, others: RoleShapes) -> Iterator[str]:
    """Yield a line for each thing that keeps a role's adapters from being built."""
    backends = {role.role: role.backend for role in recipe_allocation(recipe).roles}
    for name, role in roles_of(recipe).items():
        if role.trained is not None and role.trained.lora is not None:
            backend = backends.get(name, backends["actor"])
            yield from _problems(ROLES[name].key, role.trained, backend, others.get(name, shape))
    yield from _joint_problems(recipe, shape)
    reference = roles_of(recipe).get("ref")
    if reference is not None and recipe.actor.lora is not None and reference.section.follows is not None:
        yield (
            "ref.refresh_every and ref.ema_decay let the reference follow all of the actor's weights, and with "
            "actor.lora only its adapters change: drop them, so that the reference is the actor without its adapters"
        )


def _problems(key: str, config: TrainedModelConfig, backend: str, shape: ModelShape) -> Iterator[str]:
    if backend == "megatron":
        yield from _megatron_problems(key, config)
    assert config.lora is not None
    if (path := config.lora.path) is not None and not (user_path(path) / CONFIG).is_file():
        yield f"{key}.lora.path={path!r} is no folder of adapters: it has no {CONFIG}"
    known = sorted({layer for tensor in tensors(shape) if (layer := layer_of(tensor.name)) is not None})
    for target in config.lora.targets:
        alone = config.lora.model_copy(update={"targets": [target]})
        if not any(tensor.adapts for tensor in tensors(shape.with_lora(alone))):
            yield f"{key}.lora.targets: no layer is named {target!r}: the model has {', '.join(known)}"


def _joint_problems(recipe: Recipe, shape: ModelShape) -> Iterator[str]:
    """Yield a line if adapters of experts that have one tensor for all are to be sent alone."""
    if not isinstance(recipe, TrainRecipe) or recipe.actor.lora is None or recipe.actor.lora.experts == "none":
        return
    if shape.expert_clamp is not None and recipe.rollout.weight_transport in ("adapter", "served_adapter"):
        yield (
            f"rollout.weight_transport={recipe.rollout.weight_transport} does not carry adapters of the experts of "
            f"{shape.family}, which have one tensor for all: use auto, or set actor.lora.experts=none"
        )


def _megatron_problems(key: str, config: TrainedModelConfig) -> Iterator[str]:
    if config.megatron.kernels != "fivefold":
        yield f"{key}.lora needs {key}.megatron.kernels=fivefold, and it is {config.megatron.kernels}"
    if (bridge := config.megatron.bridge_type) in ("mbridge", "megatron-bridge"):
        yield f"{key}.lora needs Fivefold's own bridge, and {key}.megatron.bridge_type is {bridge}: drop it"
