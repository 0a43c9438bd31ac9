"""Further rounds of a step, until enough prompts have completions with different rewards (DAPO, section 3.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import torch

from fivefold.algorithms.advantages.compute import Sets
from fivefold.algorithms.reward_shaping import RewardShaping
from fivefold.config.schema.train import TrainRecipe
from fivefold.experience.group import Group
from fivefold.types import Sample


def with_signal(
    recipe: TrainRecipe, first: Sequence[Group], next_round: Callable[[int, Set[int]], list[Group]]
) -> tuple[list[Group], dict[str, float]]:
    """Return a step's groups with a signal, and metrics of the rounds.

    What a round has too much is dropped. After the last round, groups without a signal fill what is missing.

    Args:
        recipe: the recipe.
        first: groups of the first round, with rewards.
        next_round: returns the groups of a round, by its number, whose prompts' indices are not among the given ones.
    """
    shaping = RewardShaping.of(recipe.actor, recipe.gconfig)
    wanted, is_gdpo = recipe.train_dataset.batch_size, recipe.actor.advantage == "gdpo"
    groups, found, n_rounds = list(first), list[Group](), 1
    new = list(first)
    while True:
        found += [group for group in new if has_signal(group.finished, shaping, one_by_one=is_gdpo)]
        if len(found) >= wanted or n_rounds == recipe.actor.dynamic_sampling_max_rounds:
            break
        # A step may reach the next epoch, and must not have one prompt as two groups.
        new = next_round(n_rounds, {group.prompt.index for group in groups})
        if not new:
            break
        groups += new
        n_rounds += 1
    kept = set([*found, *(group for group in groups if group not in found)][:wanted])
    return [group for group in groups if group in kept], {
        "dynamic_sampling/rounds": float(n_rounds),
        "dynamic_sampling/kept": len(found) / len(groups),
    }


def has_signal(samples: Sequence[Sample], shaping: RewardShaping | None, *, one_by_one: bool) -> bool:
    """Return whether the completions of a prompt differ by more than rounding in one of their rewards, or in the sum.

    The sum is compared as `shaping` scales and clips it. Penalties on length are no signal, as in DAPO, which compares
    answers and not lengths. Fewer than two samples are no signal.
    """
    if len(samples) < 2:
        return False
    if one_by_one:
        rows = [
            [sample.weights.get(name, 1.0) * sample.rewards[name] for sample in samples] for name in samples[0].rewards
        ]
    else:
        rows = [[sample.reward for sample in samples]]
    values_KN = torch.tensor(rows, dtype=torch.float64)
    group_N = torch.zeros(len(samples), dtype=torch.int64)
    return not all(
        Sets(values_N if one_by_one or shaping is None else shaping.scaled(values_N), group_N).is_constant_S.item()
        for values_N in values_KN
    )
