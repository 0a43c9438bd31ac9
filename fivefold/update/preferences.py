"""An optimizer step on an objective over the scores of whole sequences (`fivefold/algorithms/preferences.py`).

sequences ──scores, without gradient──> objective ──> loss, metrics
                                            └──> a coefficient for each sequence ──> linear loss ──> optimizer step
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fivefold.algorithms.metrics import Metric
from fivefold.algorithms.preferences import Numbers, Objective, derivatives
from fivefold.algorithms.supervised_losses import COEFFICIENT, LinearLoss
from fivefold.engine.heads import Logprobs
from fivefold.engine.values import Values
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.devices import Models
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.trainer_worker import UpdateResult


@dataclass(frozen=True)
class Comparison:
    """Sequences whose scores an objective compares."""

    batch: RemoteBatch
    objective: Objective
    n_trained: int
    """Number of the first sequences, which are trained on; the objective has no derivative by the scores of others."""

    @property
    def trained(self) -> RemoteBatch:
        """The sequences that are trained on."""
        return self.batch if self.n_trained == len(self.batch) else self.batch.select(range(self.n_trained))


@dataclass(frozen=True)
class Scoring:
    """How sequences are scored."""

    prediction: Literal["logprobs", "values"]
    """`logprobs`: by the log of the ratio of the actor's probability to the reference's. `values`: by the actor's
    value head."""

    def scores(self, models: Models, batch: RemoteBatch, timers: PhaseTimers) -> Numbers:
        """Return the score of each sequence under the current weights: float64 [N]."""
        if self.prediction == "values":
            with timers.phase("scores"):
                return models.actor.sums(batch, Values())
        with timers.phase("reference"):
            reference_N = models.frozen["ref"].sums(batch, Logprobs())
        with timers.phase("scores"):
            return models.actor.sums(batch, Logprobs()) - reference_N

    def measure(self, models: Models, comparison: Comparison) -> dict[str, float]:
        """Return the objective's metrics, including its value as `loss`."""
        # Separate timers, because the caller counts all of an evaluation as one phase.
        scores_N = self.scores(models, comparison.batch, PhaseTimers())
        _, metrics = derivatives(comparison.objective, scores_N, comparison.batch.trained_N)
        return metrics

    def update(self, models: Models, comparison: Comparison, timers: PhaseTimers) -> UpdateResult:
        """Make one optimizer step on the objective. Its metrics are of the weights before the step."""
        batch = comparison.batch
        coefficients_N, metrics = derivatives(comparison.objective, self.scores(models, batch, timers), batch.trained_N)
        scored = replace(comparison, batch=batch.with_scalars(**{COEFFICIENT: coefficients_N}))
        with timers.phase("train"):
            result = models.actor.update(scored.trained, LinearLoss(self.prediction))
        return replace(result, metrics=result.metrics | {name: Metric(value) for name, value in metrics.items()})
