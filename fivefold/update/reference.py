"""The reference in an update: its log-probs, the weight of the KL term, and weights that follow the actor's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.engine.scores import Logprobs
from fivefold.observe.timers import PhaseTimers
from fivefold.roles.actor import Actor
from fivefold.roles.frozen import FrozenModel
from fivefold.update.step import Part, Prepared, StepOutcome


@dataclass(frozen=True)
class Reference(Part):
    """Compares the policy with a reference."""

    model: FrozenModel
    actor: Actor
    temperature: float
    timers: PhaseTimers
    refresh_steps: int | None
    """Steps from one refresh of its weights to the next; None: they stay as they are."""
    is_of_tokens: bool = True
    """Whether its log-probs of tokens are read; otherwise `Pairs` asks it about whole completions."""

    def prepare(self, step: Prepared) -> Prepared:
        """Add the column `ref_logprobs`."""
        if not self.is_of_tokens:
            return step
        with self.timers.phase("reference"):
            pieces = self.model.score(step.batch, Logprobs(self.temperature, "ref_logprobs"))
            return replace(step, batch=step.batch.with_pieces(pieces))

    def loss(self, loss: PolicyLoss, step: Prepared) -> PolicyLoss:
        """Weight the KL term as the state says, if it is in the loss."""
        return replace(loss, kl_coeff=step.state.algorithm.kl_ctl) if loss.kl_coeff else loss

    def after(self, step: Prepared, outcome: StepOutcome) -> StepOutcome:
        """Measure the weight of the KL term, and refresh the reference if that is due."""
        if self.refresh_steps is not None and step.step % self.refresh_steps == 0:
            with self.timers.phase("reference"):
                self.model.follow(self.actor)
        return outcome.measured({"kl_ctl": step.state.algorithm.kl_ctl})
