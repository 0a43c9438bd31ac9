"""Memory that other roles keep on the rollout's devices: the one thing that training asks of planning."""

from __future__ import annotations

from pathlib import Path

from fivefold.config.schema import TrainRecipe
from fivefold.planning.blueprint import draw_up
from fivefold.planning.question_sources import Changes, question_of_recipe

_ANY_GPU = "h100-80g"
"""A question names a GPU, but what a role keeps does not depend on it."""


def bytes_kept_beside_rollout(
    recipe: TrainRecipe, actor_folder: Path | str, reference_folder: Path | str | None
) -> int:
    """Return the bytes of each device that other roles keep while the rollout is awake, as `fivefold plan` counts them.

    Args:
        recipe: the roles, their layouts and their cluster.
        actor_folder: local model folder of the actor.
        reference_folder: local model folder of the reference model; None: that of the actor.

    Raises:
        ValueError: a folder without a model that can be planned, a layout that its model cannot take, or roles that do
            not fit on the cluster.
    """
    local = recipe.model_copy(
        update={
            "actor": recipe.actor.model_copy(update={"path": str(actor_folder)}),
            "ref": recipe.ref.model_copy(update={"path": None if reference_folder is None else str(reference_folder)}),
        }
    )
    return draw_up(question_of_recipe(local, _ANY_GPU, Changes())).rollouts[0].beside
