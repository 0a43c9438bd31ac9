"""The check of the loss and the advantage that a recipe names, with their options."""

from __future__ import annotations

from fivefold.algorithms.advantages.registry import build_advantage
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.config.schema.train import TrainRecipe


def check_methods(recipe: TrainRecipe) -> None:
    """Build the recipe's loss and advantage, which tries out those that the user has written.

    Raises:
        ValueError: one of them cannot be imported, does not do what its protocol says, or has wrong options.
    """
    loss = PolicyLoss.from_config(recipe.actor, recipe.gconfig)
    if loss.old_is_interpolated and loss.before is not None:
        raise ValueError(
            "actor.prox_logp_method=loglinear gives old log-probs in the update alone, but actor.loss or "
            "actor.rollout_correction.mask compares those of a whole mini-batch before it: set it to recompute"
        )
    build_advantage(recipe.actor, recipe.gconfig.n_samples)
