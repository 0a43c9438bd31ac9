"""The two decisions that a run takes from its plan: what leaves GPUs for the rollout, and how checkpoints are written.

Training uses nothing else of this room.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fivefold.config.roles import with_paths
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.role import Offloadable
from fivefold.config.schema.train import TrainRecipe
from fivefold.planning.defaults import DEFAULT_GPU
from fivefold.planning.estimate import estimate
from fivefold.planning.estimates import Estimate
from fivefold.planning.host_memory import GIB
from fivefold.planning.recipe_inputs import Changes, recipe_inputs


@dataclass(frozen=True)
class WhileGenerating:
    """How the roles that share the devices of a role that generates wait while it is awake."""

    kept: Mapping[str, int]
    """Bytes of each of its devices that other roles keep, by role that generates; missing: none."""
    offloaded: tuple[Offloadable, ...]
    """What the actor moves off the devices."""
    streams_frozen: bool = False
    """Whether weights that the actor does not train are sent to the rollout from host memory."""


ALWAYS_ON_DEVICE = WhileGenerating({}, ())
"""No role waits."""


def while_generating(
    recipe: TrainRecipe, folders: Mapping[str, Path | str], *, gpu_memory: int | None
) -> WhileGenerating:
    """Return how other roles wait while the rollout or the judge is awake, as `fivefold plan` computes it.

    Args:
        recipe: the roles, their layouts and their cluster.
        folders: local model folder of the actor, and of each role that has another model.
        gpu_memory: bytes of the smallest GPU, which decides what must be offloaded; None: unknown, taken as 80 GB.

    Raises:
        ValueError: a folder without a known model, a layout that its model cannot take, or roles that do not fit on the
            cluster.
    """
    found = _estimate(recipe, folders, gpu_memory, None)
    kept = {rollout.placed.role: rollout.others for rollout in found.rollouts}
    return WhileGenerating(kept, found.offloaded, found.streams_frozen)


def copies_state(
    recipe: Recipe, folders: Mapping[str, Path | str], *, gpu_memory: int | None, host_memory: int
) -> bool:
    """Return whether trainers copy their state to host memory for a checkpoint, as `fivefold plan` decides it.

    Args:
        recipe: the roles, their layouts and their cluster.
        folders: as for `while_generating`.
        gpu_memory: as for `while_generating`.
        host_memory: bytes of host memory of the smallest node, unless the recipe sets it.

    Raises:
        ValueError: as `while_generating`.
    """
    return _estimate(recipe, folders, gpu_memory, host_memory).copies_state


def _estimate(
    recipe: Recipe, folders: Mapping[str, Path | str], gpu_memory: int | None, host_memory: int | None
) -> Estimate:
    """Return the estimate of a recipe for the memory that the run has found."""
    local = with_paths(recipe, {role: str(folder) for role, folder in folders.items()})
    # Only the memory of the GPU counts here.
    inputs = recipe_inputs(local, DEFAULT_GPU, Changes())
    if gpu_memory is not None:
        inputs = replace(inputs, gpu=replace(inputs.gpu, memory=gpu_memory))
    if inputs.host_memory_gib is None and host_memory is not None:
        inputs = replace(inputs, host_memory_gib=host_memory // GIB)
    return estimate(inputs)
