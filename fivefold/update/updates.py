"""The optimizer steps of a training step: the metrics of all of them, and an end of the run if none succeeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fivefold.algorithms.metrics import merge_metrics, metric_values
from fivefold.config.schema.roles import ActorConfig, CriticConfig
from fivefold.data.batches import minibatches
from fivefold.roles.trainer_worker import UpdateResult

MOST_SKIPPED = 3
"""Updates in a row without a finite gradient, after which the run ends: it will not recover by itself."""


class SkipGuard:
    """Tells of a run whose gradients are repeatedly not finite, and which is to end."""

    def __init__(self, role: str = "actor") -> None:
        """Count no update yet; `role` is the role whose updates are counted."""
        self._role = role
        self.in_a_row = 0
        """Number of the last updates that were skipped one after the other."""
        self.problem: str | None = None
        """Why the run is to end: `MOST_SKIPPED` updates in a row were skipped. None: it goes on."""

    def count(self, result: UpdateResult, step: int) -> None:
        """Count updates that were skipped in a row."""
        self.in_a_row = self.in_a_row + 1 if result.skipped else 0
        if self.in_a_row >= MOST_SKIPPED:
            self.problem = (
                f"{MOST_SKIPPED} updates in a row had a gradient that is not finite, the last one at step {step}"
                f"{_where(result)}. The {self._role}'s weights are those before them. "
                f"Lower {self._role}.optimizer.lr, or look at what these steps trained on"
            )


def make_updates(
    config: ActorConfig | CriticConfig,
    groups: Sequence[int],
    seed: Callable[[int], str],
    update: Callable[[list[int]], UpdateResult],
    guard: SkipGuard,
    step: int,
) -> dict[str, float]:
    """Make the updates of all epochs and mini-batches of a step, or those until the guard finds a problem.

    Returns the metrics of all of them together.

    Args:
        config: numbers of epochs and of mini-batches.
        groups: the group of each of the step's sequences; a mini-batch has whole groups.
        seed: returns the seed of an epoch's random split into mini-batches.
        update: makes the update on the sequences with these indices.
        guard: counts the updates that are skipped.
        step: the training step.
    """
    results: list[UpdateResult] = []
    for epoch in range(config.ppo_epochs):
        for indices in minibatches(groups, config.ppo_n_minibatches, seed(epoch)):
            results.append(update(indices))
            guard.count(results[-1], step)
            if guard.problem is not None:
                return metric_values(merge_metrics(result.metrics for result in results))
    return metric_values(merge_metrics(result.metrics for result in results))


def _where(result: UpdateResult) -> str:
    if result.non_finite:
        return f", first in {', '.join(result.non_finite)}"
    return ": every parameter's gradient is finite, but the norm of all of them is beyond float32"
