"""The training half of a step: from rewarded samples to new weights."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.algorithms.advantages import KLInReward, compute_advantages
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.config.schema import TrainRecipe
from fivefold.data.batches import minibatches
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.actor import Actor
from fivefold.roles.critic_update import CriticUpdate
from fivefold.roles.reference import Reference
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.trainer import BatchChange, UpdateResult
from fivefold.roles.updates import SkipGuard, average_updates
from fivefold.types import Sample


class PolicyUpdate:
    """Computes advantages and old log-probs, and makes the optimizer steps of one training step."""

    def __init__(
        self,
        recipe: TrainRecipe,
        actor: Actor,
        reference: Reference | None,
        timers: PhaseTimers,
        critic: CriticUpdate | None = None,
    ) -> None:
        self._config = config = recipe.actor
        self._seed = recipe.seed
        self._actor = actor
        self._reference = reference
        self._critic = critic
        self._timers = timers
        self._temperature = recipe.gconfig.temperature
        self._loss = PolicyLoss.from_config(config, recipe.gconfig)
        penalized = config.kl_in == "reward" and config.kl_ctl > 0
        self._kl = KLInReward(config.kl_ctl, config.kl_estimator) if penalized else None
        self._change: BatchChange | None = None if self._kl is None else self._kl.subtracted
        self.guard = SkipGuard()
        # A KL in the reward needs the log-probs of the policy that sampled, as the trainer computes them.
        needed = penalized or config.ppo_epochs * config.ppo_n_minibatches > 1
        self._recomputes = needed if config.recompute_logprob is None else config.recompute_logprob

    def prepare(self, samples: Sequence[Sample], batch: RemoteBatch) -> tuple[RemoteBatch, dict[str, float]]:
        """Return `batch`, the samples' sequences, with advantages and log-probs; and metrics of rewards, advantages."""
        advantages = compute_advantages(
            [sample.reward for sample in samples], [sample.prompt.index for sample in samples], self._config
        )
        if self._critic is not None:
            batch = self._critic.values(batch)
        if self._recomputes:
            with self._timers.phase("old log-probs"):
                batch = batch.with_pieces(self._actor.logprobs(batch, self._temperature))
        if self._reference is not None:
            with self._timers.phase("reference"):
                batch = batch.with_pieces(self._reference.logprobs(batch, self._temperature))
        values_N = advantages.advantages_N.numpy()
        if self._critic is None:
            return batch.with_scalars(advantages=values_N), advantages.metrics
        batch, whitening, metrics = self._critic.advantages(batch.with_scalars(rewards=values_N), self._kl)
        self._change = None if whitening is None else whitening.applied
        return batch, advantages.metrics | metrics

    def run(self, batch: RemoteBatch, groups: Sequence[int], step: int) -> dict[str, float]:
        """Make the updates of all epochs and mini-batches of a step. Returns the averages of their metrics.

        Args:
            batch: the batch that `prepare` returned.
            groups: the group of each of its sequences.
            step: the training step, from which the random split into mini-batches is seeded.

        Raises:
            RunFailed: several updates in a row had no finite gradient.
        """
        metrics: dict[str, float] = {}
        if self._critic is not None:
            metrics = self._critic.run(batch, groups, step)
            if self._critic.is_warming_up(step):
                return metrics
        results: list[UpdateResult] = []
        for epoch in range(self._config.ppo_epochs):
            seed = f"{self._seed}-{step}-{epoch}"
            for indices in minibatches(groups, self._config.ppo_n_minibatches, seed):
                results.append(self._actor.update(batch.select(indices), self._loss, self._change))
                self.guard.check(results[-1], step)
        return metrics | average_updates(results)
