"""From generated samples to rewarded ones, and what a step's samples look like in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fivefold.rewards import NamedReward, compute_rewards
from fivefold.types import Sample

FULL_REWARD = 1.0
"""A completion counts as right from this reward on."""


def judge(samples: Sequence[Sample], reward: NamedReward) -> list[Sample]:
    """The samples with the reward of each, under the reward's name.

    Raises:
        ValueError: the reward function returned something else than a finite number.
        Exception: whatever the reward function raised, with a note that names function and prompt.
    """
    prompts = [sample.prompt for sample in samples]
    rewards = compute_rewards(reward, prompts, [sample.response_text for sample in samples])
    return [sample.rewarded({reward.name: value}) for sample, value in zip(samples, rewards, strict=True)]


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """`accuracy` (share of samples with full reward), response lengths in tokens, and the share that hit the limit."""
    lengths = [sample.n_sampled for sample in samples]
    return {
        "accuracy": accuracy(samples),
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": float(max(lengths)),
        "truncated": sum(sample.finish_reason == "length" for sample in samples) / len(samples),
    }


def accuracy(samples: Sequence[Sample]) -> float:
    """Share of samples with full reward."""
    return sum(sample.reward >= FULL_REWARD for sample in samples) / len(samples)


def as_record(sample: Sample, **where: Any) -> dict[str, Any]:
    """A sample as one line of `samples.jsonl`; `where` comes first, such as the step."""
    return {
        **where,
        "prompt": sample.prompt.text,
        "response": sample.response_text,
        "ground_truth": sample.prompt.ground_truth,
        "reward": sample.reward,
        "finish_reason": sample.finish_reason,
        "weight_version": sample.versions[1],
    }
