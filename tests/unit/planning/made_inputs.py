"""Inputs of plans that are not read from a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.families.read import find_shape
from fivefold.families.shape import ModelShape
from fivefold.layout.gpus import find_gpu
from fivefold.layout.parser import parse
from fivefold.planning.inputs import Inputs, Leaves, ModelInputs, RolloutInputs
from fivefold.planning.workload import Workload

WORK = Workload(4096, 256, 8192)


def frozen(shape: ModelShape, work: Workload = WORK, offload: bool | None = None) -> ModelInputs:
    """A frozen model, whose weights are offloaded, or (None) if it shares its GPUs."""
    return ModelInputs(shape, work, trains=False, leaves={"params": offload})


def made_inputs(
    text: str,
    *,
    shape: ModelShape | None = None,
    work: Workload = WORK,
    leaves: Leaves | None = None,
    others: Mapping[str, ModelInputs] | None = None,
    batch: int = 64,
    memory_fraction: float | None = None,
    **changes: Any,
) -> Inputs:
    """Roles as an allocation string lays them out; `work`, `shape` and `leaves` are the actor's."""
    actor = ModelInputs(shape or find_shape("Qwen3-8B"), work, leaves=leaves or {})
    values: dict[str, Any] = {
        "gpu": find_gpu("h100"),
        "allocation": parse(text),
        "n_nodes": 1,
        "gpus_per_node": 8,
        "models": {"actor": actor, **(others or {})},
        "rollout": RolloutInputs(batch, generated=256, memory_fraction=memory_fraction),
    }
    return Inputs(**{**values, **changes})
