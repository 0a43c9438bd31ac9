"""The values of one update, and the options that compose it.

samples ──prepare──> Prepared ──before──> ──loss, minibatch──> mini-batches ──after──> StepOutcome
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from fivefold.algorithms.metrics import merge_metrics, metric_values
from fivefold.algorithms.policy_loss import PolicyLoss
from fivefold.algorithms.state import AlgorithmState
from fivefold.checkpoints.run_state import RunState
from fivefold.config.schema.roles import ActorConfig, CriticConfig
from fivefold.data.sampler import SamplerState
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.trainer_worker import BatchChange, UpdateResult
from fivefold.types import Sample

MOST_SKIPPED = 3
"""Updates in a row without a finite gradient, after which the run ends: it will not recover by itself."""


@dataclass(frozen=True)
class Skips:
    """The last updates of a role that were skipped one after the other, because their gradient was not finite."""

    role: str = "actor"
    in_a_row: int = 0
    problem: str | None = None
    """Why the run is to end: `MOST_SKIPPED` updates in a row were skipped. None: it continues."""

    def after(self, result: UpdateResult, step: int) -> Skips:
        """Return the skips after an update of training step `step`."""
        in_a_row = self.in_a_row + 1 if result.skipped else 0
        if in_a_row < MOST_SKIPPED:
            return Skips(self.role, in_a_row)
        return Skips(
            self.role,
            in_a_row,
            f"{MOST_SKIPPED} updates in a row had a gradient that is not finite, the last one at step {step}"
            f"{_where(result)}. The {self.role}'s weights are those before them. "
            f"Lower {self.role}.optimizer.lr, or look at what these steps trained on",
        )


def make_updates(
    config: ActorConfig | CriticConfig,
    groups: Sequence[int],
    seed: Callable[[int], str],
    update: Callable[[int, list[int]], UpdateResult],
    skips: Skips,
    step: int,
) -> tuple[dict[str, float], Skips]:
    """Make the updates of all epochs and mini-batches of a step, or those until too many in a row were skipped.

    Returns the metrics of all of them together, and the skips after them.

    Args:
        config: numbers of epochs and of mini-batches.
        groups: the group of each of the step's sequences; a mini-batch has whole groups.
        seed: returns the seed of an epoch's random split into mini-batches.
        update: makes the update of a number, counted from 0, on the sequences with these indices.
        skips: the skips before the step.
        step: the training step.
    """
    results: list[UpdateResult] = []
    for epoch in range(config.ppo_epochs):
        for indices in minibatches(groups, config.ppo_n_minibatches, seed(epoch)):
            results.append(update(len(results), indices))
            skips = skips.after(results[-1], step)
            if skips.problem is not None:
                return metric_values(merge_metrics(result.metrics for result in results)), skips
    return metric_values(merge_metrics(result.metrics for result in results)), skips


def _where(result: UpdateResult) -> str:
    if result.non_finite:
        return f", first in {', '.join(result.non_finite)}"
    return ": every parameter's gradient is finite, but the norm of all of them is beyond float32"


def minibatches(groups: Sequence[int], n_minibatches: int, seed: str) -> list[list[int]]:
    """Split a step's samples into mini-batches of whole groups, drawn at random.

    They have equally many groups, as far as their number allows: a group is missing all of whose episodes have failed.

    Args:
        groups: group id of each sample, in any order.
        n_minibatches: number of mini-batches; with fewer groups, there are as many as groups.
        seed: seed of the draw; pass one that differs from step to step and from epoch to epoch.

    Returns:
        Indices into `groups`, each exactly once, in ascending order within a mini-batch.
    """
    distinct = list(dict.fromkeys(groups))
    if n_minibatches > 1:
        random.Random(seed).shuffle(distinct)
    n = min(n_minibatches, len(distinct))
    place = {group: position * n // len(distinct) for position, group in enumerate(distinct)}
    split: list[list[int]] = [[] for _ in range(n)]
    for index, group in enumerate(groups):
        split[place[group]].append(index)
    return split


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
