"""The training half of a step: from rewarded samples to new weights.

rewards ──> advantages ──> old log-probs ──> mini-batches: loss, gradient, optimizer step ──> metrics, state

What a recipe adds to that is in parts (step.py), which are composed when the run is set up (compose.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from fivefold.algorithms.advantages.compute import Outcomes, Scores, compute_advantages
from fivefold.algorithms.batch_steps import InTurn
from fivefold.algorithms.corrections import RolloutCorrection
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.algorithms.reward_shaping import RewardShaping
from fivefold.algorithms.state import AlgorithmState
from fivefold.config.schema.roles import ActorConfig
from fivefold.engine.scores import Logprobs
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.actor import Actor
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.trainer_worker import UpdateResult
from fivefold.types import Sample
from fivefold.update.step import Part, Prepared, StepOutcome, UpdateState, make_updates


@dataclass(frozen=True)
class PolicyUpdate:
    """Computes advantages and old log-probs, and makes the optimizer steps of one training step."""

    config: ActorConfig
    actor: Actor
    seed: int
    """Seed of the random splits into mini-batches."""
    shaping: RewardShaping | None
    advantage: Callable[[Scores], torch.Tensor]
    base_loss: PolicyLoss
    """The loss, as far as it is the same in all steps."""
    parts: Sequence[Part]

    def prepare(
        self, step: int, samples: Sequence[Sample], batch: RemoteBatch, greedy: Sequence[Sample], state: UpdateState
    ) -> Prepared:
        """Compute what the updates read.

        Args:
            step: the training step, counted from 1.
            samples: the step's samples, with rewards.
            batch: their sequences.
            greedy: the greedy sample of each prompt, if the advantage compares with it.
            state: the state before the step.
        """
        baselines = _outcomes(greedy) if greedy else None
        advantages = compute_advantages(_outcomes(samples), self.shaping, self.advantage, baselines)
        prepared = Prepared(step, samples, batch, state, advantages.advantages_N.numpy(), metrics=advantages.metrics)
        for part in self.parts:
            prepared = part.prepare(prepared)
        return prepared

    def run(self, step: Prepared) -> StepOutcome:
        """Make the updates of all epochs and mini-batches."""
        outcome = StepOutcome(step.state)
        for part in self.parts:
            outcome = part.before(step, outcome)
            if outcome.problem is not None or not outcome.trained:
                return outcome
        loss = self.base_loss
        for part in self.parts:
            loss = part.loss(loss, step)
        averages, skips = make_updates(
            self.config,
            step.groups,
            lambda epoch: f"{self.seed}-{step.step}-{epoch}",
            lambda number, indices: self._update(step, indices, loss, outcome, number),
            step.state.skips["actor"],
            step.step,
        )
        return self._after(step, outcome.measured(averages).counted(skips))

    def _update(
        self, step: Prepared, indices: Sequence[int], loss: PolicyLoss, outcome: StepOutcome, number: int
    ) -> UpdateResult:
        """Make one optimizer step on the sequences with these indices."""
        batch = step.batch.select(indices)
        for part in self.parts:
            batch = part.minibatch(batch, loss, step, outcome, number)
        return self.actor.update(batch, loss, InTurn(step.changes) if step.changes else None)

    def _after(self, step: Prepared, outcome: StepOutcome) -> StepOutcome:
        if outcome.problem is not None:
            return outcome
        algorithm = step.state.algorithm.after(self.config, outcome.metrics, len(step.samples))
        outcome = replace(outcome, state=replace(outcome.state, algorithm=algorithm))
        for part in self.parts:
            outcome = part.after(step, outcome)
        return outcome

    def needs_rollout_logprobs(self, state: UpdateState) -> bool:
        """Return whether the next loss is corrected by the rollout's log-probs, and so needs them for all tokens."""
        return any(part.needs_rollout_logprobs(state) for part in self.parts)


@dataclass(frozen=True)
class OldLogprobs(Part):
    """Computes the log-probs of the policy before the step."""

    actor: Actor
    timers: PhaseTimers
    what: Logprobs
    """What is computed, with the column `old_logprobs` among others."""

    def prepare(self, step: Prepared) -> Prepared:
        """Add its columns."""
        with self.timers.phase("old log-probs"):
            pieces = self.actor.score(step.batch, self.what)
            return replace(step, batch=step.batch.with_pieces(pieces))


class AdvantagesOfSamples(Part):
    """Gives each token the advantage of its sample."""

    def prepare(self, step: Prepared) -> Prepared:
        """Add the scalar `advantages`."""
        return replace(step, batch=step.batch.with_scalars(advantages=step.values_N))


@dataclass(frozen=True)
class CorrectedRollout(Part):
    """Corrects losses once rollout and trainer disagree, or from the first step on if other weights sample."""

    may_correct: bool
    """Whether the log-probs of all tokens may be had."""
    max_age: int
    """Largest number of steps by which the weights that sample are older than those that are trained."""
    from_start: bool
    """Whether the weights that sample differ from the trained ones for certain: they are older, or quantized."""
    threshold: float
    """KL divergence between rollout and trainer, in nats a token, above which they disagree."""
    tells: bool
    """Whether to tell the user that they disagree: not if the rollout's log-probs are the old ones anyway."""

    def loss(self, loss: PolicyLoss, step: Prepared) -> PolicyLoss:
        """Correct the loss, and count the ages of tokens."""
        if self.needs_rollout_logprobs(step.state):
            loss = replace(loss, correction=RolloutCorrection.automatic())
        return replace(loss, version=step.step - 1, max_age=self.max_age) if self.max_age else loss

    def after(self, step: Prepared, outcome: StepOutcome) -> StepOutcome:
        """Tell the user in the step in which the disagreement begins."""
        begins = self._corrects(outcome.state.algorithm) and not self._corrects(step.state.algorithm)
        if not begins or not self.tells:
            return outcome
        found = (
            f"rollout and trainer disagree by {outcome.metrics['rollout_mismatch_kl']:.2g} nats a token, more than "
            f"{self.threshold:g}"
        )
        if self.may_correct:
            return replace(
                outcome, news=f"{found}: from the next step on, losses are weighted (TIS, docs/algorithms.md)"
            )
        return replace(
            outcome,
            news=f"{found}; to correct it, the log-probs of all tokens are needed: drop rollout.logprob_share",
        )

    def needs_rollout_logprobs(self, state: UpdateState) -> bool:
        """Return whether the next loss is corrected."""
        return self.may_correct and self._corrects(state.algorithm)

    def _corrects(self, state: AlgorithmState) -> bool:
        return self.from_start or state.corrects_rollout


def _outcomes(samples: Sequence[Sample]) -> Outcomes:
    weights = samples[0].weights
    return Outcomes(
        [sample.reward for sample in samples],
        [sample.prompt.index for sample in samples],
        [sample.n_sampled for sample in samples],
        [sample.rewards for sample in samples] if weights else (),
        weights,
    )
