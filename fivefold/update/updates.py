"""What follows from the results of optimizer steps: one number for each metric, and an end if none of them succeeds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from fivefold.algorithms.ages import averaged
from fivefold.algorithms.measures import N_PARTS, PART, SHARE
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

    Returns the averages of their metrics.

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
                return average_updates(results)
    return average_updates(results)


def _where(result: UpdateResult) -> str:
    if result.non_finite:
        return f", first in {', '.join(result.non_finite)}"
    return ": every parameter's gradient is finite, but the norm of all of them is beyond float32"


_OVER_KNOWN = (
    "rollout_mismatch",
    "rollout_mismatch_kl",
    "rollout_mismatch_kl_reverse",
    "rollout_ratio",
    "rollout_ratio_square",
)
"""Metrics over the tokens that have a log-prob of the rollout."""


_OF_UPDATES, _SECTIONS_OF_UPDATES = {"loss", "grad_norm", "lr"}, ("pipeline/", "experts/", "peak_memory_gb/")
"""Metrics that are no means over trained tokens, and beginnings of the names of others."""


def effective_share(mean: float, mean_square: float) -> float:
    """Return Kish's effective sample size, (sum w)^2 / sum w^2, as a share of the number of weights w."""
    return mean * mean / mean_square if mean_square > 0 else 0.0


def _is_of_tokens(name: str) -> bool:
    """Return whether a metric is a mean over trained tokens."""
    return not (name in _OF_UPDATES or name.startswith(_SECTIONS_OF_UPDATES) or _extreme(name))


def _extreme(name: str) -> Callable[[Iterable[float]], float] | None:
    """Return the extreme value by which a metric is reduced; None: it is averaged."""
    return {"max": max, "min": min}.get(name.rpartition("/")[2])


def _reduced(name: str, row: Sequence[tuple[float, int]]) -> float:
    """Return one number for the values of a metric, each with its weight."""
    if (extreme := _extreme(name)) is not None:
        return extreme(value for value, _ in row)
    return sum(value * weight for value, weight in row) / sum(weight for _, weight in row)


def average_updates(results: Sequence[UpdateResult]) -> dict[str, float]:
    """Reduce each metric of several updates to one number.

    Means over tokens become means over the trained tokens of all updates; if no update has any, they are left out.
    What an update has as a whole, such as `loss`, is averaged over updates. Names that end in `/max` or `/min` are
    reduced by maximum or minimum, `lr` is the last one, and `skipped_updates` counts the updates that were skipped.
    """
    values: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for result in results:
        for name, value in result.metrics.items():
            if weight := result.n_trained if _is_of_tokens(name) else 1:
                values[name].append((value, weight))
    averages = {name: _reduced(name, row) for name, row in values.items()}
    averages["lr"] = results[-1].metrics["lr"]
    if (share := averages.get("rollout_mismatch_share")) is not None:
        # The sums are over the tokens that have a log-prob of the rollout, and were divided by all trained tokens.
        known = {name: averages.pop(name) for name in _OVER_KNOWN}
        if share > 0:
            averages |= {name: value / share for name, value in known.items()}
            averages["rollout_ess"] = effective_share(averages["rollout_ratio"], averages.pop("rollout_ratio_square"))
    for number in range(1, N_PARTS + 1):
        # The sums are over the tokens of one part, and were divided by all trained tokens.
        if (of_part := averages.pop(f"{SHARE}/{number}", None)) is not None:
            entropy = averages.pop(f"{PART}/{number}")
            averages |= {f"{PART}/{number}": entropy / of_part} if of_part > 0 else {}
    if (share := averages.pop("imitation_share", None)) is not None:
        # The sum is over the tokens of given responses.
        nll = averages.pop("imitation_nll")
        averages |= {"imitation_nll": nll / share} if share > 0 else {}
    if "correction/weight" in averages:
        averages["correction/ess"] = effective_share(
            averages["correction/weight"], averages.pop("correction/weight_square")
        )
    averages = averaged(averages)
    averages["skipped_updates"] = float(sum(result.skipped for result in results))
    return averages
