"""What the loss of a step takes from the steps before: a correction of the rollout's log-probs, an entropy bonus."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fivefold.algorithms.corrections import RolloutCorrection
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.algorithms.state import AlgorithmState
from fivefold.update.step import Part, Prepared, StepOutcome, UpdateState


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


class EntropyTarget(Part):
    """Adapts the weight of the entropy bonus."""

    def loss(self, loss: PolicyLoss, step: Prepared) -> PolicyLoss:
        """Weight the bonus as the state says."""
        return replace(loss, entropy_coeff=step.state.algorithm.entropy_bonus)

    def after(self, step: Prepared, outcome: StepOutcome) -> StepOutcome:
        """Measure the weight."""
        return outcome.measured({"entropy_coeff": step.state.algorithm.entropy_bonus})


@dataclass(frozen=True)
class EntropyDecay(Part):
    """Lets the weight of the entropy bonus fall linearly to 0, without a bonus for tokens above a target."""

    first: float
    """Weight in step 1."""
    n_steps: int
    """Steps with a bonus."""
    most: float | None
    """Entropy in nats above which a token has no more bonus; None: any has."""

    def loss(self, loss: PolicyLoss, step: Prepared) -> PolicyLoss:
        """Weight the bonus of this step."""
        return replace(loss, entropy_coeff=self._weight(step), entropy_most=self.most)

    def after(self, step: Prepared, outcome: StepOutcome) -> StepOutcome:
        """Measure the weight."""
        return outcome.measured({"entropy_coeff": self._weight(step)})

    def _weight(self, step: Prepared) -> float:
        return self.first * max(0.0, 1.0 - (step.step - 1) / self.n_steps)


@dataclass(frozen=True)
class AlignedRoutes(Part):
    """Measures routes, and ends the run if they seem to be of other tokens, or of another model."""

    min_overlap: float
    """Least share of the replayed experts that the routers would choose themselves."""
    token_bytes: int
    """Bytes of a token's routes."""

    def after(self, step: Prepared, outcome: StepOutcome) -> StepOutcome:
        """Compare the overlap with the least one."""
        outcome = outcome.measured({"replay/bytes": float(step.batch.n_tokens * self.token_bytes)})
        overlap = 1.0 - outcome.metrics.get("replay/differs", 0.0)
        if overlap >= self.min_overlap:
            return outcome
        return replace(
            outcome,
            problem=f"only {overlap:.1%} of the replayed experts are those that the routers would choose, less than "
            f"actor.router_replay_min_overlap={self.min_overlap:g}: the routes are of other tokens or another model. "
            "Lower the share if the policy moves that far in a step, or set actor.router_replay to none",
        )
