"""What a loss knows of whole samples: which are not trained, what each weighs, and their numbers."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from fivefold.algorithms.losses.covariance import NUMBER, sequence_numbers
from fivefold.algorithms.metrics import effective_share
from fivefold.algorithms.reward_shaping import RewardShaping
from fivefold.algorithms.sample_weights import SAMPLE_WEIGHT, SampleWeights
from fivefold.config.schema.train import TrainRecipe
from fivefold.types import Prompt, StopReason
from fivefold.update.step import Part, Prepared


@dataclass(frozen=True)
class Masked(Part):
    """Trains no token of samples that ended for some reasons, such as those that were cut off."""

    reasons: Set[StopReason]

    def prepare(self, step: Prepared) -> Prepared:
        """Take their tokens out of the mask."""
        untrained = [index for index, sample in enumerate(step.samples) if sample.finish_reason in self.reasons]
        return replace(step, batch=step.batch.untrained(untrained))


@dataclass(frozen=True)
class MaskedGroups(Part):
    """Trains no token of prompts that are too easy or too hard for the policy, by the mean reward of their samples."""

    above: float
    below: float
    of_accuracy: bool = False
    """Whether the share of samples that are right counts in place of their mean reward."""

    def prepare(self, step: Prepared) -> Prepared:
        """Take their tokens out of the mask."""
        groups: dict[int, list[int]] = {}
        for index, group in enumerate(step.groups):
            groups.setdefault(group, []).append(index)
        values = [float(each.is_right) if self.of_accuracy else each.reward for each in step.samples]
        means = {group: fmean(values[index] for index in own) for group, own in groups.items()}
        untrained = {group for group, mean in means.items() if not self.above < mean < self.below}
        batch = step.batch.untrained([index for group in untrained for index in groups[group]])
        return replace(step, batch=batch).measured({"masked_groups": len(untrained) / len(groups)})


@dataclass(frozen=True)
class WeightedSamples(Part):
    """Weighs the policy's cost by sample."""

    weights: SampleWeights
    shaping: RewardShaping | None

    def prepare(self, step: Prepared) -> Prepared:
        """Add the scalar `sample_weight`."""
        lengths_N = torch.tensor([sample.n_sampled for sample in step.samples])
        rewards_N = torch.tensor([sample.reward for sample in step.samples], dtype=torch.float64)
        prompts = [sample.prompt for sample in step.samples]
        shaped_N = rewards_N if self.shaping is None else self.shaping(rewards_N, lengths_N)
        weights_N = self.weights(shaped_N, prompts, lengths_N)
        weighted = step.batch.with_scalars(**{SAMPLE_WEIGHT: weights_N.float().numpy()})
        share = effective_share(float(weights_N.mean()), float((weights_N**2).mean()))
        return replace(step, batch=weighted).measured({"sample_weights/ess": share})


@dataclass(frozen=True)
class NumberedSequences(Part):
    """Numbers the sequences for a loss that draws some of their tokens."""

    seed: int

    def prepare(self, step: Prepared) -> Prepared:
        """Add the scalar `sequence_number`."""
        numbers_N = sequence_numbers(f"{self.seed}-{step.step}", len(step.batch))
        return replace(step, batch=step.batch.with_scalars(**{NUMBER: numbers_N}))


def check_prompts(recipe: TrainRecipe, prompts: Sequence[Prompt]) -> None:
    """Check the data of a recipe's loss.

    Raises:
        ValueError: a prompt lacks what its samples are weighted by, or a teacher.
    """
    if (weights := SampleWeights.of(recipe.actor)) is not None:
        weights.difficulties(prompts)
    if recipe.teachers:
        from fivefold.update.teachers import check_taught  # here, because most runs have none

        check_taught(recipe, prompts)
