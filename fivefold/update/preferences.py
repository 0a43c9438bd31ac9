"""An optimizer step on an objective over the scores of whole sequences (`fivefold/algorithms/preferences.py`).

sequences ──scores, without gradient──> objective ──> loss, metrics
                                            └──> a coefficient for each sequence ──> linear loss ──> optimizer step
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from fivefold.algorithms.metrics import Metric
from fivefold.algorithms.preferences import Objective, derivatives
from fivefold.algorithms.supervised_losses import COEFFICIENT, LinearLoss
from fivefold.engine.scores import Logprobs
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
    """`logprobs`: by the log of the actor's probability. `values`: by the actor's value head."""

    def derivatives(
        self, models: Models, comparison: Comparison, timers: PhaseTimers
    ) -> tuple[npt.NDArray[np.float32], dict[str, float]]:
        """Return the derivatives of the objective by the scores of the current weights, float32 [N], and metrics."""
        batch, reference_N = comparison.batch, None
        if "ref" in models.frozen:
            with timers.phase("reference"):
                reference_N = models.frozen["ref"].sums(batch, Logprobs())
        with timers.phase("scores"):
            scores_N = models.actor.sums(batch, Values() if self.prediction == "values" else Logprobs())
        return derivatives(comparison.objective, scores_N, batch.trained_N, reference_N)

    def measure(self, models: Models, comparison: Comparison) -> dict[str, float]:
        """Return the objective's metrics, including its value as `loss`."""
        # Separate timers, because the caller counts all of an evaluation as one phase.
        return self.derivatives(models, comparison, PhaseTimers())[1]

    def update(self, models: Models, comparison: Comparison, timers: PhaseTimers) -> UpdateResult:
        """Make one optimizer step on the objective. Its metrics are of the weights before the step."""
        coefficients_N, metrics = self.derivatives(models, comparison, timers)
        scored = replace(comparison, batch=comparison.batch.with_scalars(**{COEFFICIENT: coefficients_N}))
        with timers.phase("train"):
            result = models.actor.update(scored.trained, LinearLoss(self.prediction))
        return replace(result, metrics=result.metrics | {name: Metric(value) for name, value in metrics.items()})
