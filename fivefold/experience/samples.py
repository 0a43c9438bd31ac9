"""Rewards of generated samples, and metrics of a step's samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fivefold.rewards.compute import compute_rewards
from fivefold.rewards.reward import NamedReward
from fivefold.types import Sample

FULL_REWARD = 1.0
"""Least reward of a completion that counts as correct."""


def judge(samples: Sequence[Sample], reward: NamedReward) -> list[Sample]:
    """Compute the reward of each sample; return the samples with it, under the reward's name.

    Raises:
        ValueError: the reward function failed, or returned anything but a finite number; see `compute_rewards`.
    """
    prompts = [sample.prompt for sample in samples]
    rewards = compute_rewards(reward, prompts, [sample.response_text for sample in samples])
    return [sample.rewarded({reward.name: value}) for sample, value in zip(samples, rewards, strict=True)]


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return `accuracy` (see below), response lengths in tokens, and the share of samples cut off at the limit."""
    lengths = [sample.n_sampled for sample in samples]
    return {
        "accuracy": accuracy(samples),
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": float(max(lengths)),
        "truncated": sum(sample.finish_reason == "length" for sample in samples) / len(samples),
    }


def accuracy(samples: Sequence[Sample]) -> float:
    """Return the share of samples with full reward."""
    return sum(sample.reward >= FULL_REWARD for sample in samples) / len(samples)


def extremes(samples: Sequence[Sample]) -> list[Sample]:
    """Return the sample with the highest reward and the one with the lowest; one sample if all rewards are equal."""
    best = max(samples, key=lambda sample: sample.reward)
    worst = min(samples, key=lambda sample: sample.reward)
    return [best] if best.reward == worst.reward else [best, worst]


def as_record(sample: Sample, **where: Any) -> dict[str, Any]:
    """Return a sample as one line of `samples.jsonl`; `where`, such as the step, comes first."""
    return {
        **where,
        "prompt": sample.prompt.text,
        "response": sample.response_text,
        "ground_truth": sample.prompt.ground_truth,
        "reward": sample.reward,
        "finish_reason": sample.finish_reason,
        "weight_version": sample.versions[1],
    }
