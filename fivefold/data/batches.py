"""Splits a step's samples into mini-batches of whole groups."""

from __future__ import annotations

import random
from collections.abc import Sequence


def minibatches(groups: Sequence[int], n_minibatches: int, seed: str) -> list[list[int]]:
    """Split a step's samples into mini-batches of equally many whole groups, drawn at random.

    Args:
        groups: group id of each sample, in any order.
        n_minibatches: number of mini-batches; the number of groups must be a multiple of it.
        seed: seed of the draw; pass one that differs from step to step and from epoch to epoch.

    Returns:
        Indices into `groups`, each exactly once, in ascending order within a mini-batch.

    Raises:
        ValueError: a number of groups that is not a multiple of `n_minibatches`.
    """
    distinct = list(dict.fromkeys(groups))
    if n_minibatches < 1 or len(distinct) % n_minibatches:
        raise ValueError(
            f"{len(distinct)} groups cannot be split into {n_minibatches} mini-batches of whole groups: "
            "make train_dataset.batch_size a multiple of actor.ppo_n_minibatches"
        )
    if n_minibatches > 1:
        random.Random(seed).shuffle(distinct)
    size = len(distinct) // n_minibatches
    place = {group: position // size for position, group in enumerate(distinct)}
    split: list[list[int]] = [[] for _ in range(n_minibatches)]
    for index, group in enumerate(groups):
        split[place[group]].append(index)
    return split
