"""The pairs of online DPO in an update: who is compared, and what each completion then weighs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from fivefold.algorithms.advantages.pairs import best_and_worst
from fivefold.algorithms.imitation import NLL_WEIGHT
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.algorithms.preferences import DirectPreference, PairLoss, derivatives
from fivefold.engine.scores import Logprobs
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.actor import Actor
from fivefold.roles.frozen import FrozenModel
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.update.step import Part, Prepared, StepOutcome

PAIR = "pair"
"""Name of the scalar with i for the best and -i for the worst completion of pair i of the step, counted from 1; else
0."""
REFERENCE = "reference_logprob"
"""Name of the scalar with the reference's log-prob of a completion."""
MEASURES = ("pairs/loss", "pairs/accuracy", "pairs/margin", "pairs/reward/chosen", "pairs/reward/rejected")
"""Metrics of the objective."""


@dataclass(frozen=True)
class Pairs(Part):
    """Gives the best and the worst completion of each group the advantages of DPO's loss, and trains on no other."""

    actor: Actor
    reference: FrozenModel
    loss_type: str
    label_smoothing: float
    temperature: float
    timers: PhaseTimers

    def prepare(self, step: Prepared) -> Prepared:
        """Find the pairs, and measure them with the weights before the step."""
        pairs = best_and_worst(step.values_N.tolist(), step.groups, (step.batch.trained_N > 0).tolist())
        pair_N = np.zeros(len(step.batch), np.float32)
        for number, (best, worst) in enumerate(pairs, start=1):
            pair_N[best], pair_N[worst] = number, -number
        batch = step.batch.untrained(np.flatnonzero(pair_N == 0).tolist()).with_scalars(**{PAIR: pair_N})
        advantages_N, reference_N = np.zeros((2, len(batch)), np.float32)
        metrics: dict[str, float] = {}
        if pairs:
            order = list(chain.from_iterable(pairs))
            own = batch.select(order)
            with self.timers.phase("reference"):
                reference_N[order] = self.reference.sums(own, Logprobs(self.temperature))
            own = own.with_scalars(**{REFERENCE: reference_N[order]})
            advantages_N[order], metrics = self._advantages(own, step.state.algorithm.kl_ctl)
        batch = batch.with_scalars(**{REFERENCE: reference_N}, advantages=advantages_N)
        shown = {name: metrics[name.removeprefix("pairs/")] for name in MEASURES} if pairs else {}
        moments = {"advantage/mean": float(advantages_N.mean()), "advantage/std": float(advantages_N.std())}
        return replace(step, batch=batch).measured({"pairs": float(len(pairs)), **shown, **moments})

    def minibatch(
        self, batch: RemoteBatch, loss: PolicyLoss, step: Prepared, outcome: StepOutcome, number: int
    ) -> RemoteBatch:
        """Weigh the pairs by the weights before this update, and leave out what is not trained on."""
        pair_N = batch.scalars[PAIR]
        order = np.lexsort((-pair_N, abs(pair_N)))[int((pair_N == 0).sum()) :]
        if number > 0 and len(order):
            advantages_N = np.zeros(len(batch), np.float32)
            advantages_N[order], _ = self._advantages(batch.select(order.tolist()), step.state.algorithm.kl_ctl)
            batch = batch.with_scalars(advantages=advantages_N)
        is_used_N = (pair_N != 0) | (batch.scalars.get(NLL_WEIGHT, np.zeros(len(batch))) > 0)
        return batch.select(np.flatnonzero(is_used_N).tolist()) if is_used_N.any() else batch

    def _advantages(self, pairs: RemoteBatch, beta: float) -> tuple[npt.NDArray[np.float32], dict[str, float]]:
        """Return the advantage of each sequence by the current weights, float32 [2 B], and metrics.

        Args:
            pairs: B pairs, the best one of each before the worst one.
            beta: weight of the distance from the reference.
        """
        objective = DirectPreference(PairLoss(self.loss_type, beta, self.label_smoothing))
        with self.timers.phase("scores"):
            scores_N = self.actor.sums(pairs, Logprobs(self.temperature))
        reference_N = pairs.scalars[REFERENCE].astype(np.float64)
        derivatives_N, metrics = derivatives(objective, scores_N, pairs.trained_N, reference_N)
        return -len(pairs) * derivatives_N, metrics
