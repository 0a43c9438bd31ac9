"""The optimizer steps of a training step: the metrics of all of them, and an end of the run if none succeeds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fivefold.algorithms.metrics import merge_metrics, metric_values
from fivefold.config.schema.roles import ActorConfig, CriticConfig
from fivefold.roles.trainer_worker import UpdateResult

MOST_SKIPPED = 3
"""Updates in a row without a finite gradient, after which the run ends: it will not recover by itself."""


@dataclass(frozen=True)
class Skips:
    """The last updates of a role that were skipped one after the other, because their gradient was not finite."""

    role: str = "actor"
    in_a_row: int = 0
    problem: str | None = None
    """Why the run is to end: `MOST_SKIPPED` updates in a row were skipped. None: it continues."""

    def after(self, result: UpdateResult, step: int) -> Skips:
        """Return the skips after an update of training step `step`."""
        in_a_row = self.in_a_row + 1 if result.skipped else 0
        if in_a_row < MOST_SKIPPED:
            return Skips(self.role, in_a_row)
        return Skips(
            self.role,
            in_a_row,
            f"{MOST_SKIPPED} updates in a row had a gradient that is not finite, the last one at step {step}"
            f"{_where(result)}. The {self.role}'s weights are those before them. "
            f"Lower {self.role}.optimizer.lr, or look at what these steps trained on",
        )


def make_updates(
    config: ActorConfig | CriticConfig,
    groups: Sequence[int],
    seed: Callable[[int], str],
    update: Callable[[int, list[int]], UpdateResult],
    skips: Skips,
    step: int,
) -> tuple[dict[str, float], Skips]:
    """Make the updates of all epochs and mini-batches of a step, or those until too many in a row were skipped.

    Returns the metrics of all of them together, and the skips after them.

    Args:
        config: numbers of epochs and of mini-batches.
        groups: the group of each of the step's sequences; a mini-batch has whole groups.
        seed: returns the seed of an epoch's random split into mini-batches.
        update: makes the update of a number, counted from 0, on the sequences with these indices.
        skips: the skips before the step.
        step: the training step.
    """
    results: list[UpdateResult] = []
    for epoch in range(config.ppo_epochs):
        for indices in minibatches(groups, config.ppo_n_minibatches, seed(epoch)):
            results.append(update(len(results), indices))
            skips = skips.after(results[-1], step)
            if skips.problem is not None:
                return metric_values(merge_metrics(result.metrics for result in results)), skips
    return metric_values(merge_metrics(result.metrics for result in results)), skips


def _where(result: UpdateResult) -> str:
    if result.non_finite:
        return f", first in {', '.join(result.non_finite)}"
    return ": every parameter's gradient is finite, but the norm of all of them is beyond float32"


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
