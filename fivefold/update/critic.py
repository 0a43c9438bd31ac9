"""The critic's half of a step: values and advantages before the actor's updates, and the updates of the critic itself.

rewards, tokens ──values──> ──GAE──> advantages ──whitening──> the actor's updates
                                └──> returns ───────────────> the critic's updates
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fivefold.algorithms.gae import GAE, EstimateMoments, Estimates, Whitening
from fivefold.algorithms.kl import KLEstimator
from fivefold.algorithms.kl_in_reward import KLInReward
from fivefold.algorithms.value_loss import ValueLoss
from fivefold.config.schema.roles import CriticConfig
from fivefold.engine.contract import OFFLOADABLE
from fivefold.engine.values import Values
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.models import TrainedModel
from fivefold.roles.trainer_worker import UpdateResult
from fivefold.update.step import Part, Prepared, StepOutcome, make_updates


@dataclass(frozen=True)
class Critic(Part):
    """Estimates the advantages of tokens, and makes the critic's optimizer steps."""

    model: TrainedModel
    config: CriticConfig
    gae: GAE
    whitens: bool
    """Whether advantages are brought to mean 0 and standard deviation 1 over the tokens of a step."""
    kl_estimator: KLEstimator | None
    """Estimator of a KL penalty in the reward of each token; None: there is none."""
    seed: int
    timers: PhaseTimers

    def prepare(self, step: Prepared) -> Prepared:
        """Add the columns `values`, `advantages` and `returns`, from the critic as it is before the step."""
        with self.timers.phase("values"), self.model.working("params"):
            batch = step.batch.with_pieces(self.model.score(step.batch, Values()))
        batch = batch.with_scalars(rewards=step.values_N)
        estimator = self.kl_estimator
        kl = None if estimator is None else KLInReward(step.state.algorithm.kl_ctl, estimator)
        with self.timers.phase("advantages"):
            pieces, estimates = self.model.trainer.compute(batch, Estimates(self.gae, kl))
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
        changes = (Whitening(advantages.mean, advantages.std).applied,) if self.whitens else ()
        return replace(step, batch=batch.with_pieces(pieces), changes=changes).measured(metrics)

    def before(self, step: Prepared, outcome: StepOutcome) -> StepOutcome:
        """Make the critic's updates of all epochs and mini-batches; while it warms up, the policy is not trained."""
        loss = ValueLoss(self.config.eps_clip, self.config.loss_aggregation)

        def update(_: int, indices: Sequence[int]) -> UpdateResult:
            return self.model.update(step.batch.select(indices), loss)

        with self.timers.phase("critic train"), self.model.working(*OFFLOADABLE):
            averages, skips = make_updates(
                self.config,
                step.groups,
                lambda epoch: f"{self.seed}-{step.step}-{epoch}-critic",
                update,
                step.state.skips["critic"],
                step.step,
            )
        outcome = outcome.measured({f"critic/{name}": value for name, value in averages.items()}).counted(skips)
        return replace(outcome, trained=step.step > self.config.warmup_steps)
