"""Further parts of the update of a policy: bonuses for entropy, and routes that are replayed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.update.step import Part, Prepared, StepOutcome


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
