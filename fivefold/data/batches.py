"""Splits a step's samples into mini-batches of whole groups."""

from __future__ import annotations

import random
from collections.abc import Sequence


def minibatches(groups: Sequence[int], n_minibatches: int, seed: str) -> list[list[int]]:
    """Split a step's samples into mini-batches of whole groups, drawn at random.

    They have equally many groups, as far as their number allows: a group is missing all of whose episodes have failed.

    Args:
        groups: group id of each sample, in any order.
        n_minibatches: number of mini-batches; with fewer groups, there are as many as groups.
        seed: seed of the draw; pass one that differs from step to step and from epoch to epoch.

    Returns:
        Indices into `groups`, each exactly once, in ascending order within a mini-batch.
    """
    distinct = list(dict.fromkeys(groups))
    if n_minibatches > 1:
        random.Random(seed).shuffle(distinct)
    n = min(n_minibatches, len(distinct))
    place = {group: position * n // len(distinct) for position, group in enumerate(distinct)}
    split: list[list[int]] = [[] for _ in range(n)]
    for index, group in enumerate(groups):
        split[place[group]].append(index)
    return split
