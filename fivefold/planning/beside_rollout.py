"""All that training asks of planning: how roles wait beside the rollout, and how checkpoints are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fivefold.config.roles import with_paths
from fivefold.config.schema.recipe import Recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.planning.blueprint import Blueprint, draw_up
from fivefold.planning.host_memory import GIB
from fivefold.planning.memory import Kind
from fivefold.planning.question_sources import Changes, question_of_recipe

_ANY_GPU = "h100-80g"
"""A question names a GPU, of which only the memory counts here."""


@dataclass(frozen=True)
class BesideRollout:
    """How the roles that share the rollout's devices wait while it is awake."""

    kept: int
    """Bytes of each device that they keep."""
    offloaded: tuple[Kind, ...]
    """What the actor moves off the devices."""


def beside_rollout(recipe: TrainRecipe, folders: Mapping[str, Path | str], *, gpu_memory: int | None) -> BesideRollout:
    """Return how other roles wait while the rollout is awake, as `fivefold plan` counts it.

    Args:
        recipe: the roles, their layouts and their cluster.
        folders: local model folder of the actor, and of each role that has a model of its own.
        gpu_memory: bytes of the smallest GPU, by which the plan decides what must be offloaded; None: it is not known,
            and taken to be 80 GB.

    Raises:
        ValueError: a folder without a model that can be planned, a layout that its model cannot take, or roles that do
            not fit on the cluster.
    """
    blueprint = _blueprint(recipe, folders, gpu_memory, None)
    return BesideRollout(blueprint.rollouts[0].beside, blueprint.offloaded)


def copies_state(
    recipe: Recipe, folders: Mapping[str, Path | str], *, gpu_memory: int | None, host_memory: int
) -> bool:
    """Return whether trainers copy their state to host memory for a checkpoint, as `fivefold plan` decides it.

    Args:
        recipe: the roles, their layouts and their cluster.
        folders: as `beside_rollout` takes them.
        gpu_memory: as `beside_rollout` takes it.
        host_memory: bytes of host memory of the smallest node, if the recipe does not tell it.

    Raises:
        ValueError: as `beside_rollout` does.
    """
    return _blueprint(recipe, folders, gpu_memory, host_memory).copies_state


def _blueprint(
    recipe: Recipe, folders: Mapping[str, Path | str], gpu_memory: int | None, host_memory: int | None
) -> Blueprint:
    """Return the plan of a recipe on the memory that the run has found."""
    local = with_paths(recipe, {role: str(folder) for role, folder in folders.items()})
    question = question_of_recipe(local, _ANY_GPU, Changes())
    if gpu_memory is not None:
        question = replace(question, gpu=replace(question.gpu, memory=gpu_memory))
    if question.host_memory_gib is None and host_memory is not None:
        question = replace(question, host_memory_gib=host_memory // GIB)
    return draw_up(question)
