"""The values of one update, and the options that compose it.

samples ──prepare──> Prepared ──before──> ──loss, minibatch──> mini-batches ──after──> StepOutcome
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.algorithms.state import AlgorithmState
from fivefold.checkpoints.run_state import RunState
from fivefold.config.schema.roles import ActorConfig
from fivefold.data.sampler import SamplerState
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.trainer_worker import BatchChange
from fivefold.types import Sample
from fivefold.update.updates import Skips


@dataclass(frozen=True)
class UpdateState:
    """What updates carry from step to step."""

    algorithm: AlgorithmState
    skips: Mapping[str, Skips]
    """Updates that were skipped in a row, by role."""
    expert_sampler: SamplerState | None = None
    """Position in the expert's examples after the step; None: there are none."""

    @staticmethod
    def of(run: RunState, config: ActorConfig) -> UpdateState:
        """Return the state of a run before its next step."""
        algorithm = AlgorithmState.of(config) if run.algorithm is None else run.algorithm.resumed(config)
        skips = {"actor": run.skips_in_a_row, "critic": run.critic_skips_in_a_row}
        return UpdateState(algorithm, {role: Skips(role, n) for role, n in skips.items()}, run.expert_sampler)

    def stored(self, run: RunState) -> RunState:
        """Return the state of a run with this one."""
        return replace(
            run,
            algorithm=self.algorithm,
            skips_in_a_row=self.skips["actor"].in_a_row,
            critic_skips_in_a_row=self.skips["critic"].in_a_row,
            expert_sampler=self.expert_sampler,
        )


@dataclass(frozen=True)
class Prepared:
    """A step's sequences with everything that its updates read."""

    step: int
    """The training step, counted from 1."""
    samples: Sequence[Sample]
    """Samples with their rewards, grouped by prompt."""
    batch: RemoteBatch
    """The same sequences, in the same order."""
    state: UpdateState
    """The state before the step."""
    values_N: npt.NDArray[np.float32]
    """The advantage of each sample, or the shaped reward where advantages are estimated token by token."""
    changes: tuple[BatchChange, ...] = ()
    """What happens to the advantages of a replica's tokens before they are trained on."""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def groups(self) -> list[int]:
        """Index of each sample's prompt: samples with the same one are a group."""
        return [sample.prompt.index for sample in self.samples]

    def measured(self, metrics: Mapping[str, float]) -> Prepared:
        """Return the same with further metrics."""
        return replace(self, metrics={**self.metrics, **metrics})


@dataclass(frozen=True)
class StepOutcome:
    """What a step's updates came to."""

    state: UpdateState
    """The state after the step."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    news: str | None = None
    """What the user should know of the step."""
    problem: str | None = None
    """Why the run is to end."""
    given: Sequence[RemoteBatch] = ()
    """An expert's responses, on which each pass trained as well."""
    trained: bool = True
    """Whether the policy is trained in the step."""

    def measured(self, metrics: Mapping[str, float]) -> StepOutcome:
        """Return the same with further metrics."""
        return replace(self, metrics={**self.metrics, **metrics})

    def counted(self, skips: Skips) -> StepOutcome:
        """Return the same after updates of a role, and its problem if too many were skipped."""
        state = replace(self.state, skips={**self.state.skips, skips.role: skips})
        return replace(self, state=state, problem=skips.problem)


class Part:
    """An option of an update. Each method returns what it is given, unless the option changes it."""

    def prepare(self, step: Prepared) -> Prepared:
        """Add what the updates read."""
        return step

    def before(self, step: Prepared, outcome: StepOutcome) -> StepOutcome:
        """Act before the policy's updates."""
        return outcome

    def loss(self, loss: PolicyLoss, step: Prepared) -> PolicyLoss:
        """Change the loss of the step."""
        return loss

    def minibatch(
        self, batch: RemoteBatch, loss: PolicyLoss, step: Prepared, outcome: StepOutcome, number: int
    ) -> RemoteBatch:
        """Change the mini-batch of the update `number` of the step, counted from 0."""
        return batch

    def after(self, step: Prepared, outcome: StepOutcome) -> StepOutcome:
        """Act after the policy's updates."""
        return outcome

    def needs_rollout_logprobs(self, state: UpdateState) -> bool:
        """Return whether the next step reads the rollout's log-prob of every token because of the option."""
        return False
