"""What other roles keep on the rollout's devices, and what they move off: all that training asks of planning."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from fivefold.config.schema.train import TrainRecipe
from fivefold.planning.blueprint import draw_up
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


def beside_rollout(
    recipe: TrainRecipe,
    actor_folder: Path | str,
    reference_folder: Path | str | None,
    critic_folder: Path | str | None = None,
    *,
    gpu_memory: int | None,
) -> BesideRollout:
    """Return how other roles wait while the rollout is awake, as `fivefold plan` counts it.

    Args:
        recipe: the roles, their layouts and their cluster.
        actor_folder: local model folder of the actor.
        reference_folder: local model folder of the reference model; None: that of the actor.
        critic_folder: local model folder of the critic; None: there is none.
        gpu_memory: bytes of the smallest GPU, by which the plan decides what must be offloaded; None: it is not known,
            and taken to be 80 GB.

    Raises:
        ValueError: a folder without a model that can be planned, a layout that its model cannot take, or roles that do
            not fit on the cluster.
    """
    critic = recipe.critic
    local = recipe.model_copy(
        update={
            "critic": None if critic is None else critic.model_copy(update={"path": str(critic_folder)}),
            "actor": recipe.actor.model_copy(update={"path": str(actor_folder)}),
            "ref": recipe.ref.model_copy(update={"path": None if reference_folder is None else str(reference_folder)}),
        }
    )
    question = question_of_recipe(local, _ANY_GPU, Changes())
    if gpu_memory is not None:
        question = replace(question, gpu=replace(question.gpu, memory=gpu_memory))
    blueprint = draw_up(question)
    return BesideRollout(blueprint.rollouts[0].beside, blueprint.offloaded)
