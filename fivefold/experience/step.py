"""Synchronous experience: each step reads prompts, generates samples and computes their rewards itself.

A group's rewards are computed as soon as it is finished, while others are generated (`overlap.py`).

next prompts ─> samples ─> rewards ─> groups with signal ─> enough? ─> experience
     ^                                                        │ no, with `actor.dynamic_sampling`
     └────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from fivefold.algorithms.reward_shaping import RewardShaping
from fivefold.checkpoints.writer import StateOwner
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.sampler import EpochSampler, SamplerState
from fivefold.experience.overlap import generate_and_judge
from fivefold.experience.samples import has_signal, outcomes
from fivefold.experience.source import Experience
from fivefold.observe.timers import PhaseTimers
from fivefold.rewards.reward_set import RewardSet
from fivefold.roles.remote_batch import RemoteBatch
from fivefold.roles.responses import Generated
from fivefold.roles.reward_model import RewardModel
from fivefold.roles.rollout import Rollout
from fivefold.rollout.protocol import SamplingParams
from fivefold.types import Prompt, Sample


@dataclass(frozen=True)
class StepSource:
    """Takes the next prompts of the data set, and generates their samples with the current weights."""

    recipe: TrainRecipe
    sampler: EpochSampler[Prompt]
    rollout: Rollout
    sampling: SamplingParams
    rewards: RewardSet
    timers: PhaseTimers
    corrects: Callable[[], bool]
    """Whether the next loss is corrected by the rollout's log-probs, of which it then needs all."""
    reward_model: RewardModel | None = None
    """The model of which one of the rewards is the score."""
    renew: Callable[[int], None] | None = None
    """Gives weights of a version to replicas whose server died and was started again; None: a death is an error."""

    @property
    def owners(self) -> Mapping[str, StateOwner]:
        """Return nothing: between two steps, no samples wait."""
        return {}

    @property
    def sampler_state(self) -> SamplerState:
        """Position in the training data behind the prompts that were taken."""
        return self.sampler.state_dict()

    def weights_sent(self, version: int) -> None:
        """Do nothing: every step begins after the weights were sent."""

    def weights_follow(self, version: int, give: Callable[[], None]) -> None:
        """Call `give`: the next step begins with the weights that it gives the rollout."""
        give()

    def settle(self) -> None:
        """Do nothing: nothing goes on between two steps."""

    def take_news(self) -> str | None:
        """Return nothing: `renew` tells of a server that dies while a step is answered."""
        return None

    def take(self, step: int) -> Experience:
        """Return the experience of training step `step`, counted from 1."""
        actor = self.recipe.actor
        experience = self._dynamic(step) if actor.dynamic_sampling else self._sampled(self.sampler.next_batch(), step)
        if actor.advantage == "remax":
            experience = replace(experience, greedy=self._greedy(experience.samples, step))
        return experience

    def _sampled(self, prompts: Sequence[Prompt], step: int, round_: int = 0) -> Experience:
        # A further round of a step has random choices of its own.
        key: tuple[int | str, ...] = (self.recipe.seed, "train", step, *((round_,) if round_ else ()))
        sampling = replace(self.sampling, logprob_share=1.0) if self.corrects() else self.sampling
        generated, samples = self._answered(prompts, self.recipe.gconfig.n_samples, sampling, key, step)
        self.sampler.told(outcomes(samples))
        return Experience(samples, generated.batch, generated.metrics)

    def _dynamic(self, step: int) -> Experience:
        """Sample further prompts until enough have completions with different rewards (DAPO, section 3.2).

        Each round reads a whole batch, so the sampler stays at the beginning of one. What a round has too much is
        dropped. After the last round, prompts without signal fill what is missing.
        """
        shaping = RewardShaping.of(self.recipe.actor, self.recipe.gconfig)
        wanted, is_gdpo = self.recipe.train_dataset.batch_size, self.recipe.actor.advantage == "gdpo"
        rounds: list[Experience] = []
        with_signal: list[int] = []
        without: list[int] = []
        n_samples, seen = 0, set[int]()
        while len(with_signal) < wanted and len(rounds) < self.recipe.actor.dynamic_sampling_max_rounds:
            # A step may reach the next epoch, and must not have one prompt as two groups.
            prompts = [prompt for prompt in self.sampler.next_batch() if prompt.index not in seen]
            seen.update(prompt.index for prompt in prompts)
            if not prompts:
                self.sampler.told(())
                break
            rounds.append(self._sampled(prompts, step, len(rounds)))
            for _, group in groupby(rounds[-1].samples, key=lambda sample: sample.prompt.index):
                samples = list(group)
                (with_signal if has_signal(samples, shaping, one_by_one=is_gdpo) else without).append(n_samples)
                n_samples += len(samples)
        size = self.recipe.gconfig.n_samples
        starts = [*with_signal, *without][:wanted]
        indices = [index for start in sorted(starts) for index in range(start, start + size)]
        samples = [sample for one in rounds for sample in one.samples]
        return Experience(
            [samples[index] for index in indices],
            RemoteBatch.joined([one.batch for one in rounds]).select(indices),
            {
                **rounds[-1].metrics,
                "dynamic_sampling/rounds": float(len(rounds)),
                "dynamic_sampling/kept": len(with_signal) / (len(with_signal) + len(without)),
            },
        )

    def _greedy(self, samples: Sequence[Sample], step: int) -> list[Sample]:
        """Return the most likely completion of each prompt, with its reward."""
        prompts = list({sample.prompt.index: sample.prompt for sample in samples}.values())
        sampling = replace(self.sampling, greedy=True, seeded=False, logprob_share=0.0)
        _, greedy = self._answered(prompts, 1, sampling, (self.recipe.seed, "greedy", step), step)
        return greedy

    def _answered(
        self, prompts: Sequence[Prompt], n_samples: int, sampling: SamplingParams, key: tuple[int | str, ...], step: int
    ) -> tuple[Generated, list[Sample]]:
        """Generate completions of each prompt and compute their rewards. Returns them without rewards and with them."""
        renew = None if self.renew is None else partial(self.renew, step - 1)
        return generate_and_judge(
            lambda finished: self.rollout.generate(prompts, n_samples, sampling, key, finished, renew=renew),
            self.rewards,
            self.timers,
            self.reward_model,
        )
