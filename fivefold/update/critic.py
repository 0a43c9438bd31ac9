"""The critic's half of a step: values and advantages before the actor's update, and the update of the critic itself.

rewards, tokens ──values──> ──GAE──> advantages ──whitening──> the actor's updates
                                └──> returns ───────────────> the critic's updates
"""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.algorithms.gae import GAE, EstimateMoments, Estimates, Whitening
from fivefold.algorithms.kl_in_reward import KLInReward
from fivefold.algorithms.value_loss import ValueLoss
from fivefold.config.schema.roles import CriticConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.engine.contract import OFFLOADABLE
from fivefold.engine.values import Values
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.models import TrainedModel
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.update.updates import SkipGuard, make_updates


class CriticUpdate:
    """Computes the advantages of one training step, and makes the critic's optimizer steps."""

    def __init__(self, recipe: TrainRecipe, config: CriticConfig, critic: TrainedModel, timers: PhaseTimers) -> None:
        self._config = config
        self._seed = recipe.seed
        self._critic = critic
        self._timers = timers
        actor = recipe.actor
        self._gae = GAE(actor.discount, actor.gae_lambda, config.gae_lambda, actor.gae_length_alpha)
        self._whitens = recipe.actor.whitens
        self._loss = ValueLoss(config.eps_clip, config.loss_aggregation)
        self.guard = SkipGuard("critic")

    def is_warming_up(self, step: int) -> bool:
        """Return whether only the critic is trained in step `step`, counted from 1."""
        return step <= self._config.warmup_steps

    def values(self, batch: RemoteBatch) -> RemoteBatch:
        """Return `batch` with the values of the critic as it is before the step."""
        with self._timers.phase("values"), self._critic.working("params"):
            return batch.with_pieces(self._critic.score(batch, Values()))

    def advantages(
        self, batch: RemoteBatch, kl: KLInReward | None
    ) -> tuple[RemoteBatch, Whitening | None, dict[str, float]]:
        """Return `batch` with advantages and returns, what the actor's update does with the former, and metrics.

        Args:
            batch: a batch with values, and the reward of each sequence as the scalar `rewards`.
            kl: a penalty in the reward of each token; None: there is none.
        """
        with self._timers.phase("advantages"):
            pieces, estimates = self._critic.trainer.compute(batch, Estimates(self._gae, kl))
        moments = EstimateMoments.merged(estimates)
        advantages, returns = moments.advantages, moments.returns
        metrics = {
            "advantage/mean": advantages.mean,
            "advantage/std": advantages.std,
            "critic/explained_variance": moments.explained_variance,
            "critic/values": moments.mean_value,
            "critic/returns": returns.mean,
            "critic/returns/std": returns.std,
        }
        whitening = Whitening(advantages.mean, advantages.std) if self._whitens else None
        return batch.with_pieces(pieces), whitening, metrics

    def run(self, batch: RemoteBatch, groups: Sequence[int], step: int) -> dict[str, float]:
        """Make the updates of all epochs and mini-batches of a step. Returns the averages of their metrics.

        Args:
            batch: the batch that `advantages` returned.
            groups: the group of each of its sequences.
            step: the training step, from which the random split into mini-batches is seeded.
        """
        with self._timers.phase("critic train"), self._critic.working(*OFFLOADABLE):
            averages = make_updates(
                self._config,
                groups,
                lambda epoch: f"{self._seed}-{step}-{epoch}-critic",
                lambda indices: self._critic.update(batch.select(indices), self._loss),
                self.guard,
                step,
            )
        return {f"critic/{name}": value for name, value in averages.items()}


def critic_update(
    recipe: TrainRecipe, critic: TrainedModel | None, timers: PhaseTimers, skips_in_a_row: int
) -> CriticUpdate | None:
    """Return the critic's half of the steps, if there is a critic; its last updates were skipped so many times."""
    if recipe.critic is None or critic is None:
        return None
    update = CriticUpdate(recipe, recipe.critic, critic, timers)
    update.guard.in_a_row = skips_in_a_row
    return update
