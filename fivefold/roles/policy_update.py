"""The training half of a step: from rewarded samples to new weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from fivefold.algorithms.advantages import KLInReward, compute_advantages
from fivefold.algorithms.loss import PolicyLoss
from fivefold.config.schema import TrainRecipe
from fivefold.data.batches import minibatches
from fivefold.observe.errors import RunFailed
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.actor import Actor
from fivefold.roles.reference import Reference
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.trainer import UpdateResult
from fivefold.types import Sample

MOST_SKIPPED = 3
"""Updates in a row without a finite gradient, after which the run ends: it will not recover by itself."""


class PolicyUpdate:
    """Computes advantages and old log-probs, and makes the optimizer steps of one training step."""

    def __init__(self, recipe: TrainRecipe, actor: Actor, reference: Reference | None, timers: PhaseTimers) -> None:
        self._config = config = recipe.actor
        self._seed = recipe.seed
        self._actor = actor
        self._reference = reference
        self._timers = timers
        self._temperature = recipe.gconfig.temperature
        self._loss = PolicyLoss.from_config(config, recipe.gconfig)
        penalized = config.kl_in == "reward" and config.kl_ctl > 0
        self._kl = KLInReward(config.kl_ctl, config.kl_estimator) if penalized else None
        self.guard = SkipGuard()
        # A KL in the reward needs the log-probs of the policy that sampled, as the trainer computes them.
        needed = penalized or config.ppo_epochs * config.ppo_n_minibatches > 1
        self._recomputes = needed if config.recompute_logprob is None else config.recompute_logprob

    def prepare(self, samples: Sequence[Sample], batch: RemoteBatch) -> tuple[RemoteBatch, dict[str, float]]:
        """Return `batch`, the samples' sequences, with advantages and log-probs; and metrics of rewards, advantages."""
        advantages = compute_advantages(
            [sample.reward for sample in samples], [sample.prompt.index for sample in samples], self._config
        )
        if self._recomputes:
            with self._timers.phase("old log-probs"):
                batch = batch.with_pieces(self._actor.logprobs(batch, self._temperature))
        if self._reference is not None:
            with self._timers.phase("reference"):
                batch = batch.with_pieces(self._reference.logprobs(batch, self._temperature))
        return batch.with_scalars(advantages=advantages.advantages_N.numpy()), advantages.metrics

    def run(self, batch: RemoteBatch, groups: Sequence[int], step: int) -> dict[str, float]:
        """Make the updates of all epochs and mini-batches of a step. Returns the averages of their metrics.

        Args:
            batch: the batch that `prepare` returned.
            groups: the group of each of its sequences.
            step: the training step, from which the random split into mini-batches is seeded.

        Raises:
            RunFailed: several updates in a row had no finite gradient.
        """
        results: list[UpdateResult] = []
        for epoch in range(self._config.ppo_epochs):
            seed = f"{self._seed}-{step}-{epoch}"
            for indices in minibatches(groups, self._config.ppo_n_minibatches, seed):
                results.append(self._actor.update(batch.select(indices), self._loss, self._kl))
                self.guard.check(results[-1], step)
        return average_updates(results)


class SkipGuard:
    """Ends a run whose gradients are repeatedly not finite."""

    def __init__(self) -> None:
        self.in_a_row = 0
        """Number of the last updates that were skipped one after the other."""

    def check(self, result: UpdateResult, step: int) -> None:
        """Count updates that were skipped in a row.

        Raises:
            RunFailed: `MOST_SKIPPED` updates in a row were skipped.
        """
        self.in_a_row = self.in_a_row + 1 if result.skipped else 0
        if self.in_a_row >= MOST_SKIPPED:
            raise RunFailed(
                f"{MOST_SKIPPED} updates in a row had a gradient that is not finite, the last one at step {step}"
                f"{_where(result)}. The weights are those before them. "
                "Lower actor.optimizer.lr, or look at what these steps trained on"
            )


def _where(result: UpdateResult) -> str:
    if result.non_finite:
        return f", first in {', '.join(result.non_finite)}"
    return ": every parameter's gradient is finite, but the norm of all of them is beyond float32"


def average_updates(results: Sequence[UpdateResult]) -> dict[str, float]:
    """Reduce each metric of several updates to one number.

    Most are averaged. Names that end in `/max` or `/min` are reduced by maximum or minimum, `lr` is the last one, and
    `skipped_updates` counts the updates that were skipped.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for name, value in result.metrics.items():
            values[name].append(value)
    reduce = {"max": max, "min": min}
    averages = {
        name: reduce.get(name.rpartition("/")[2], lambda row: sum(row) / len(row))(row) for name, row in values.items()
    }
    averages["lr"] = values["lr"][-1]
    if share := averages.get("rollout_mismatch_share"):
        # The sums are over the tokens that have a log-prob of the rollout, and were divided by all trained tokens.
        averages |= {name: averages[name] / share for name in ("rollout_mismatch", "rollout_mismatch_kl")}
    averages["skipped_updates"] = float(sum(result.skipped for result in results))
    return averages
