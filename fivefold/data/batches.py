"""Samples of a rollout as a ragged batch, and a batch as mini-batches of whole groups."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from fivefold.types import Batch, Sample


def batch_of(samples: Sequence[Sample]) -> Batch:
    """Prompt and completion of each sample, end to end, in order.

    Returns:
        A batch whose mask is 1 on the completions, with the field `rollout_logprobs` (0 on the prompts).

    Raises:
        ValueError: an empty prompt, or log-probs that do not match the completion's tokens.
    """
    for sample in samples:
        n_tokens, n_logprobs = len(sample.completion.token_ids), len(sample.completion.logprobs)
        if not sample.prompt.token_ids:
            raise ValueError(
                f"prompt {sample.prompt.index} has no tokens, so nothing predicts the first token of its completion"
            )
        if n_tokens != n_logprobs:
            raise ValueError(
                f"a completion of prompt {sample.prompt.index} has {n_tokens} tokens, but {n_logprobs} log-probs"
            )
    prompts = [sample.prompt.token_ids for sample in samples]
    completions = [sample.completion.token_ids for sample in samples]
    batch = ragged_batch(prompts, completions)
    rollout = [[0.0] * len(s.prompt.token_ids) + list(s.completion.logprobs) for s in samples]
    return batch.with_fields(rollout_logprobs=torch.tensor([x for row in rollout for x in row], dtype=torch.float32))


def ragged_batch(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Batch:
    """Token ids of prompts and of their responses as one batch; the mask is 1 on the responses."""
    tokens: list[int] = []
    mask: list[float] = []
    for prompt, response in zip(prompts, responses, strict=True):
        tokens += [*prompt, *response]
        mask += [0.0] * len(prompt) + [1.0] * len(response)
    lengths = tuple(len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True))
    return Batch(lengths, torch.tensor(tokens, dtype=torch.int64), torch.tensor(mask, dtype=torch.float32))


def group_ids(samples: Sequence[Sample]) -> list[int]:
    """The prompt that each sample answers: samples with equal ids are one group."""
    return [sample.prompt.index for sample in samples]


def minibatches(groups: Sequence[int], n_minibatches: int, seed: str) -> list[list[int]]:
    """Split a step's samples into mini-batches of equally many whole groups, drawn at random.

    Args:
        groups: group id of each sample, in any order.
        n_minibatches: number of mini-batches; the number of groups must be a multiple of it.
        seed: decides the draw; pass one that differs from step to step and from epoch to epoch.

    Returns:
        Indices into `groups`, each exactly once, in rising order within a mini-batch.

    Raises:
        ValueError: the groups cannot be shared out evenly.
    """
    distinct = list(dict.fromkeys(groups))
    if n_minibatches < 1 or len(distinct) % n_minibatches:
        raise ValueError(
            f"{len(distinct)} groups cannot be split into {n_minibatches} mini-batches of whole groups: "
            "make train_dataset.batch_size a multiple of actor.ppo_n_minibatches"
        )
    if n_minibatches > 1:
        random.Random(seed).shuffle(distinct)
    size = len(distinct) // n_minibatches
    place = {group: position // size for position, group in enumerate(distinct)}
    split: list[list[int]] = [[] for _ in range(n_minibatches)]
    for index, group in enumerate(groups):
        split[place[group]].append(index)
    return split
