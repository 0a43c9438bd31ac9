"""Lays sequences out for a reward model, whose score of a sequence is that of its last state.

    tokens   p p p r r E x      E: the end token, appended if the sequence lacks it; x: any token
    mask     0 0 0 0 0 0 1

A value belongs to the state before a token, and the last state is the one before a token that is appended. Nothing
depends on which token that is.
"""

from __future__ import annotations

import torch

from fivefold.types import Batch

N_APPENDED = 2
"""Most tokens that are appended to a sequence."""


def for_scoring(batch: Batch, end_token: int) -> Batch:
    """Return the sequences, each with its end token and one more token, which alone has the mask; without fields."""
    sequences = [_ended(tokens, end_token) for tokens in batch.split(batch.tokens_T)]
    lengths = tuple(len(tokens) for tokens in sequences)
    tokens_T = torch.cat(sequences) if sequences else batch.tokens_T
    mask_T = torch.zeros(len(tokens_T))
    if lengths:
        mask_T[torch.tensor(lengths).cumsum(0) - 1] = 1.0
    return Batch(lengths, tokens_T, mask_T)


def _ended(tokens_L: torch.Tensor, end_token: int) -> torch.Tensor:
    """Return the tokens with the end token, unless they have it, and with one more token."""
    has_end = len(tokens_L) > 0 and int(tokens_L[-1]) == end_token
    return torch.cat([tokens_L, tokens_L.new_full((1 if has_end else N_APPENDED,), end_token)])
