"""From completions to rewarded samples, and what a step's samples look like in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from fivefold.rewards import NamedReward, compute_rewards
from fivefold.types import Completion, Prompt, Sample

FULL_REWARD = 1.0
"""A completion counts as right from this reward on."""


def make_samples(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    tokenizer: PreTrainedTokenizerBase,
    reward: NamedReward,
) -> list[Sample]:
    """Decode and judge completions that come prompt by prompt, equally many for each."""
    n_samples = len(completions) // len(prompts)
    asked = [prompt for prompt in prompts for _ in range(n_samples)]
    texts = [str(tokenizer.decode(list(c.token_ids), skip_special_tokens=True)) for c in completions]
    rewards = compute_rewards(reward, asked, texts)
    return [
        Sample(prompt, completion, text, value)
        for prompt, completion, text, value in zip(asked, completions, texts, rewards, strict=True)
    ]


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """`accuracy` (share of samples with full reward), response lengths in tokens, and how many ran into the limit."""
    lengths = [len(sample.completion.token_ids) for sample in samples]
    return {
        "accuracy": accuracy(samples),
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": float(max(lengths)),
        "truncated": sum(sample.completion.finish_reason == "length" for sample in samples) / len(samples),
    }


def accuracy(samples: Sequence[Sample]) -> float:
    """Share of samples with full reward."""
    return sum(sample.reward >= FULL_REWARD for sample in samples) / len(samples)


def as_record(sample: Sample, **where: Any) -> dict[str, Any]:
    """A sample as one line of `samples.jsonl`."""
    return {
        **where,
        "prompt": sample.prompt.text,
        "response": sample.response_text,
        "ground_truth": sample.prompt.ground_truth,
        "reward": sample.reward,
        "finish_reason": sample.completion.finish_reason,
        "weight_version": sample.completion.weight_version,
    }
