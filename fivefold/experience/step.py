"""Synchronous experience: each step reads prompts, generates samples and computes their rewards itself."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.config.schema import TrainRecipe
from fivefold.data.sampler import EpochSampler
from fivefold.experience.samples import judge
from fivefold.observe.timers import PhaseTimers
from fivefold.rewards.reward import NamedReward
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.rollout import Rollout
from fivefold.rollout.protocol import SamplingParams
from fivefold.types import Prompt, Sample


@dataclass(frozen=True, eq=False)
class Experience:
    """The samples that a step trains on."""

    samples: list[Sample]
    """Samples with their rewards, those of one prompt side by side."""
    batch: RemoteBatch
    """The same sequences, in the same order."""
    metrics: dict[str, float]
    """Metrics of the rollout."""

    @property
    def groups(self) -> list[int]:
        """Index of each sample's prompt: samples with the same one are a group."""
        return [sample.prompt.index for sample in self.samples]


@dataclass(frozen=True)
class StepSource:
    """Takes the next prompts of the data set, and generates their samples with the current weights."""

    recipe: TrainRecipe
    sampler: EpochSampler[Prompt]
    rollout: Rollout
    sampling: SamplingParams
    reward: NamedReward
    timers: PhaseTimers

    def take(self, step: int) -> Experience:
        """Return the experience of training step `step`, counted from 1."""
        prompts = self.sampler.next_batch()
        with self.timers.phase("rollout"):
            key = (self.recipe.seed, "train", step)
            generated = self.rollout.generate(prompts, self.recipe.gconfig.n_samples, self.sampling, key)
        with self.timers.phase("rewards"):
            samples = judge(generated.samples, self.reward)
        return Experience(samples, generated.batch, generated.metrics)
