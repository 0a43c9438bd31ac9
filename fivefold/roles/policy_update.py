"""The training half of a step: from rewarded samples to new weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from fivefold.algorithms.advantages import compute_advantages, subtract_kl_to_go, token_advantages
from fivefold.algorithms.kl import kl_estimate
from fivefold.algorithms.loss import PolicyLoss
from fivefold.config.schema import TrainRecipe
from fivefold.data.batches import batch_of, group_ids, minibatches
from fivefold.observe.errors import RunFailed
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.launch import Actor, Reference, UpdateResult
from fivefold.types import Batch, Sample

MOST_SKIPPED = 3
"""Updates in a row without a finite gradient, after which the run ends: it will not recover by itself."""


class PolicyUpdate:
    """Advantages, old log-probs, and the optimizer steps of one training step."""

    def __init__(self, recipe: TrainRecipe, actor: Actor, reference: Reference | None, timers: PhaseTimers) -> None:
        self._config = recipe.actor
        self._seed = recipe.seed
        self._actor = actor
        self._reference = reference
        self._timers = timers
        self._temperature = recipe.gconfig.temperature
        self._loss = PolicyLoss.from_config(recipe.actor, self._temperature)
        self._n_updates = self._config.ppo_epochs * self._config.ppo_n_minibatches
        self._guard = SkipGuard()
        # The KL of a reward is taken at the policy that sampled, as the trainer sees it.
        needed = self._n_updates > 1 or (self._config.kl_in == "reward" and self._config.kl_ctl > 0)
        self._recomputes = needed if self._config.recompute_logprob is None else self._config.recompute_logprob

    def prepare(self, samples: Sequence[Sample]) -> tuple[Batch, dict[str, float]]:
        """The batch to train on, and the metrics of its rewards and advantages."""
        batch = batch_of(samples)
        advantages = compute_advantages([sample.reward for sample in samples], group_ids(samples), self._config)
        batch = self._with_old_logprobs(batch)
        if self._reference is not None:
            with self._timers.phase("reference"):
                batch = batch.with_fields(ref_logprobs=self._reference.logprobs(batch, self._temperature))
        return batch.with_fields(advantages=self._per_token(batch, advantages.advantages_N)), advantages.metrics

    def _with_old_logprobs(self, batch: Batch) -> Batch:
        """Old log-probs by the trainer or the rollout engine; none, where one update leaves them equal to the new."""
        if self._recomputes:
            with self._timers.phase("old log-probs"):
                return batch.with_fields(old_logprobs=self._actor.logprobs(batch, self._temperature))
        if self._loss.old_is_rollout:
            return batch.with_fields(old_logprobs=batch.fields["rollout_logprobs"])
        return batch

    def _per_token(self, batch: Batch, advantages_N: torch.Tensor) -> torch.Tensor:
        advantages_T = token_advantages(batch, advantages_N)
        if self._reference is None or self._config.kl_in == "loss":
            return advantages_T
        sampled_T = batch.fields.get("old_logprobs", batch.fields["rollout_logprobs"])
        kl_T = kl_estimate(sampled_T, batch.fields["ref_logprobs"], self._config.kl_estimator)
        return subtract_kl_to_go(advantages_T, kl_T, batch, self._config.kl_ctl)

    def run(self, batch: Batch, groups: Sequence[int], step: int) -> dict[str, float]:
        """All epochs and mini-batches of a step. Returns the mean of each metric over the updates.

        Raises:
            RunFailed: several updates in a row had no finite gradient.
        """
        results: list[UpdateResult] = []
        for epoch in range(self._config.ppo_epochs):
            seed = f"{self._seed}-{step}-{epoch}"
            for indices in minibatches(groups, self._config.ppo_n_minibatches, seed):
                results.append(self._actor.update(batch.select(indices), self._loss))
                self._guard.check(results[-1], step)
        return average_updates(results)


class SkipGuard:
    """Ends a run whose gradients stay without finite values."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def check(self, result: UpdateResult, step: int) -> None:
        """Count updates that were skipped in a row.

        Raises:
            RunFailed: there were `MOST_SKIPPED`.
        """
        self._in_a_row = self._in_a_row + 1 if result.skipped else 0
        if self._in_a_row >= MOST_SKIPPED:
            raise RunFailed(
                f"{MOST_SKIPPED} updates in a row had a gradient that is not finite, the last one at step {step}, "
                f"first in {', '.join(result.non_finite)}. The weights are those before them. "
                "Lower actor.optimizer.lr, or look at what these steps trained on"
            )


def average_updates(results: Sequence[UpdateResult]) -> dict[str, float]:
    """Means over updates; maxima and minima of what is one; the last learning rate; how many updates were skipped."""
    values: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for name, value in result.metrics.items():
            values[name].append(value)
    reduce = {"max": max, "min": min}
    averages = {
        name: reduce.get(name.rpartition("/")[2], lambda row: sum(row) / len(row))(row) for name, row in values.items()
    }
    averages["lr"] = values["lr"][-1]
    averages["skipped_updates"] = float(sum(result.skipped for result in results))
    return averages
