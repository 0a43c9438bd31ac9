"""Weights of whole samples: factors of the policy's cost by reward, difficulty and length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fivefold.config.schema.roles import ActorConfig, Filtration
from fivefold.types import Prompt

SAMPLE_WEIGHT = "sample_weight"
"""Name of the field with the weight of each token's sample."""
LEAST = 1e-8
"""Added to every weight, so that samples which all have the weight 0 are drawn alike."""
OF_BEST, OF_OTHERS = 0.4, 0.1
"""Weights of samples with the largest reward and of all others, with `max_random`."""


@dataclass(frozen=True)
class SampleWeights:
    """Computes the weights of the N samples of a step, whose mean is 1. Each is in proportion to the product of

        f(R)                                     by the shaped reward R (`filtration_weights`)
        0.5 + 1.5 d                              by the prompt's difficulty d from 0 to 1: difficult ones count more
        1.5 - (l - min l) / (max l - min l)      by the length l in tokens: short ones count more

    as far as each is switched on. The last two follow ROLL, which takes the minimum, the maximum and the mean
    over a micro-batch; here they are over the step, so that no weight depends on how it is split.
    """

    rule: Filtration | None = None
    power: float = 2.0
    difficulty_key: str | None = None
    """Key of `extra_info` with the difficulty of a prompt."""
    by_length: bool = False

    @staticmethod
    def of(config: ActorConfig) -> SampleWeights | None:
        """Return the weights that a recipe asks for; None: all samples count alike."""
        own = config.sample_weights
        if own.reward is None and own.difficulty_key is None and not own.length:
            return None
        return SampleWeights(own.reward, own.reward_power, own.difficulty_key, own.length)

    def __call__(self, rewards_N: torch.Tensor, prompts: Sequence[Prompt], lengths_N: torch.Tensor) -> torch.Tensor:
        """Return float64 [N].

        Args:
            rewards_N: float64 [N], shaped rewards.
            prompts: the prompt of each sample.
            lengths_N: int64 [N], sampled tokens of each.
        """
        weights_N = torch.ones_like(rewards_N)
        if self.rule is not None:
            weights_N = weights_N * filtration_weights(rewards_N, self.rule, self.power)
        if self.difficulty_key is not None:
            weights_N = weights_N * (0.5 + 1.5 * torch.tensor(self.difficulties(prompts), dtype=torch.float64))
        if self.by_length:
            beyond_N = (lengths_N - lengths_N.min()).double()
            weights_N = weights_N * (1.5 - beyond_N / beyond_N.max().clamp(min=1.0))
        return weights_N / weights_N.mean()

    def difficulties(self, prompts: Sequence[Prompt]) -> list[float]:
        """Return the difficulty of each prompt; 0 if they do not count.

        Raises:
            ValueError: a prompt without a difficulty from 0 to 1.
        """
        key = self.difficulty_key
        if key is None:
            return [0.0] * len(prompts)
        found = []
        for prompt in prompts:
            value = prompt.extra_info.get(key)
            if not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise ValueError(
                    f"actor.sample_weights.difficulty_key={key}: prompt {prompt.index + 1} ({prompt.text[-200:]!r}) "
                    f"has {value!r}, which is no number from 0 to 1: write one as {key} into the column extra_info of "
                    "every row"
                )
            found.append(float(value))
        return found


def filtration_weights(rewards_N: torch.Tensor, rule: Filtration, power: float) -> torch.Tensor:
    """Return float64 [N], proportional to how often policy filtration draws each of N samples of a step.

    PF-PPO (Shen and Zhang 2024, arXiv 2409.06957) has three rules:

        power        w = abs(R)^power
        max_min      w = 1 where R is the largest or the smallest of the step, else 0
        max_random   w = 0.4 where R is the largest of the step, else 0.1

    The paper filters the samples whose rewards a reward model tells least reliably, those in the middle. These rules
    over a whole step are verl's, which draws N samples with replacement. Here each sample is trained on once, with the
    weight of its expected number of draws, N w / sum of w: the mean gradient is the same, without the noise of drawing.
    """
    match rule:
        case "power":
            weights_N = rewards_N.abs() ** power
        case "max_min":
            weights_N = ((rewards_N == rewards_N.max()) | (rewards_N == rewards_N.min())).double()
        case "max_random":
            weights_N = torch.where(rewards_N == rewards_N.max(), OF_BEST, OF_OTHERS).double()
    return weights_N + LEAST
