"""Batches of uneven sequences to train on."""

from __future__ import annotations

from pathlib import Path

import torch
from hf_reference import logprobs_and_entropies
from tiny_models import VOCAB

from fivefold.batch import Batch

LENGTHS = (7, 1, 22, 5, 31, 9, 17)
"""Tokens of each sequence. One has a single token, so that nothing predicts it."""
UNTRAINED = 3
"""Index of a sequence whose mask is 0 on every token."""


def uneven_batch(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> Batch:
    """Return a batch of random tokens; the first third of every sequence is its prompt."""
    generator = torch.Generator().manual_seed(seed)
    masks = []
    for index, length in enumerate(lengths):
        n_prompt = length if index == UNTRAINED else max(1, length // 3)
        masks.append(torch.cat([torch.zeros(n_prompt), torch.ones(length - n_prompt)]))
    tokens = torch.randint(0, VOCAB, (sum(lengths),), generator=generator)
    return Batch(lengths, tokens, torch.cat(masks))


def policy_batch(folder: Path, seed: int = 0) -> Batch:
    """Return `uneven_batch` with advantages, and with old and reference log-probs near those of the model in `folder`.

    For either sign of the advantage, there are ratios on both sides of every clip.
    """
    batch = uneven_batch(seed)
    logprobs, _ = logprobs_and_entropies(folder, batch, temperature=1.0)
    generator = torch.Generator().manual_seed(seed + 1)
    noise = {name: torch.randn(batch.n_tokens, generator=generator) for name in ("old", "ref", "advantages")}
    return batch.with_fields(
        advantages=noise["advantages"],
        old_logprobs=logprobs + 0.3 * noise["old"],
        ref_logprobs=logprobs + 0.3 * noise["ref"],
    )
