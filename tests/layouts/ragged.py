"""Batches of uneven sequences to train on."""

from __future__ import annotations

from pathlib import Path

import torch
from hf_reference import logprobs_and_entropies
from tiny_models import VOCAB

from fivefold.types import Batch

LENGTHS = (7, 1, 22, 5, 31, 9, 17)
"""One token alone, which predicts nothing, among them."""
UNTRAINED = 3
"""A sequence whose mask is 0 all over."""


def uneven_batch(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> Batch:
    """Random tokens; the first third of every sequence is its prompt."""
    generator = torch.Generator().manual_seed(seed)
    masks = []
    for index, length in enumerate(lengths):
        n_prompt = length if index == UNTRAINED else max(1, length // 3)
        masks.append(torch.cat([torch.zeros(n_prompt), torch.ones(length - n_prompt)]))
    tokens = torch.randint(0, VOCAB, (sum(lengths),), generator=generator)
    return Batch(lengths, tokens, torch.cat(masks))


def policy_batch(folder: Path, seed: int = 0) -> Batch:
    """`uneven_batch` with advantages, and with old and reference log-probs near those of the model in `folder`.

    Near enough for ratios on both sides of every clip, of either sign of the advantage.
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
