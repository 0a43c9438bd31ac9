"""One micro-batch of whole sequences, as one rank of a context-parallel group holds it.

    ragged        aaaaaaa bbb             sequences end to end
    padded        aaaaaaa. bbb. ........  each to a multiple of 2 * cp; a filler sequence makes the total even
    rank 0 of 2   aa b .. | a. . ..       zig-zag: the first chunk of every sequence, then the last
    rank 1 of 2   aa b .. | aa b ..       the second, then the last but one

In this order, causal attention costs the same on every rank. The loss gets whole sequences again: log-probs return to
their places in the ragged batch (`LocalSequences.places_N`) and are summed over the group.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fivefold.config.schema.engine import FlashAttention
from fivefold.engine.kernels.varlen import AttentionPlan, plan_attention
from fivefold.types import Batch


@dataclass(frozen=True)
class PackedAttention:
    """The packing as attention needs it: which queries see which keys."""

    plan: AttentionPlan
    first_keys_K: torch.Tensor | None = None
    """int64 [K1], with context parallelism: the rows, among the keys gathered rank after rank, that the first chunks
    attend to."""
    second_keys_K: torch.Tensor | None = None
    """int64 [K2]: the same for the second chunks."""


@dataclass(frozen=True)
class LocalSequences:
    """This rank's share of one micro-batch. T: its tokens. N: the tokens that it predicts."""

    tokens_T: torch.Tensor
    """int64 [T]: token ids."""
    positions_T: torch.Tensor
    """int64 [T]: position of each token in its sequence."""
    padding_T: torch.Tensor
    """bool [T]: true on filler."""
    sequences_T: torch.Tensor
    """int64 [T]: index of each token's sequence; filler at the end of a sequence is of it."""
    n_sequences: int
    """Sequences of the micro-batch, one of filler included."""
    attention: PackedAttention
    rows_N: torch.Tensor
    """int64 [N]: rows of the hidden states that predict a trained token."""
    targets_N: torch.Tensor
    """int64 [N]: the tokens they predict."""
    places_N: torch.Tensor
    """int64 [N]: indices of these tokens in the ragged batch."""


def padded_tokens(lengths: Iterable[int], *, cp_size: int, tp_size: int) -> int:
    """Return the number of tokens of a micro-batch over its context-parallel group, filler included; at least 1."""
    unit = _chunk_unit(cp_size)
    total = sum(_round_up(length, unit) for length in lengths)
    return _round_up(max(total, 1), math.lcm(unit, cp_size * tp_size))


def _chunk_unit(cp_size: int) -> int:
    return 2 * cp_size if cp_size > 1 else 1


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def localize(
    batch: Batch, *, cp_rank: int, cp_size: int, total: int, flash: FlashAttention | None, device: torch.device
) -> LocalSequences:
    """Pad `batch` to `total` tokens (see `padded_tokens`) and take the share of context-parallel rank `cp_rank`.

    Only tokens whose mask is not 0 are predicted.
    """
    spans = [_round_up(length, _chunk_unit(cp_size)) for length in batch.lengths]
    lengths = list(batch.lengths)
    if total > sum(spans):
        spans.append(total - sum(spans))
        lengths.append(0)
    place = _places(spans, lengths)
    successor = torch.cat([place[1:], place.new_full((1,), -1)])
    successor[torch.tensor(spans).cumsum(0) - 1] = -1

    local = _zigzag(spans, cp_rank, cp_size)
    # Index -1, filler, reads the extra element at the end: token 0, not trained.
    tokens = torch.cat([batch.tokens_T, batch.tokens_T.new_zeros(1)])
    trained = torch.cat([batch.mask_T > 0, torch.zeros(1, dtype=torch.bool)])
    rows = trained[successor[local]].nonzero().flatten()
    places = successor[local][rows]

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    return LocalSequences(
        tokens_T=move(tokens[place[local]]),
        positions_T=move(torch.cat([torch.arange(span) for span in spans])[local]),
        padding_T=move(place[local] < 0),
        sequences_T=move(torch.arange(len(spans)).repeat_interleave(torch.tensor(spans))[local]),
        n_sequences=len(spans),
        attention=_pack(spans, cp_rank, cp_size, flash, device),
        rows_N=move(rows),
        targets_N=move(batch.tokens_T[places]),
        places_N=move(places),
    )


def _places(spans: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Return int64 [total]: the index of each padded token in the ragged batch, -1 for filler."""
    place = torch.full((sum(spans),), -1, dtype=torch.int64)
    start, source = 0, 0
    for span, length in zip(spans, lengths, strict=True):
        place[start : start + length] = torch.arange(source, source + length)
        start, source = start + span, source + length
    return place


def _zigzag(spans: Sequence[int], cp_rank: int, cp_size: int) -> torch.Tensor:
    """Return the padded places of one rank's tokens, in the rank's order: all first chunks, then all second ones."""
    if cp_size == 1:
        return torch.arange(sum(spans))
    pieces = []
    for chunk_index in (cp_rank, 2 * cp_size - 1 - cp_rank):
        start = 0
        for span in spans:
            chunk = span // (2 * cp_size)
            pieces.append(torch.arange(start + chunk_index * chunk, start + (chunk_index + 1) * chunk))
            start += span
    return torch.cat(pieces)


def _pack(
    spans: Sequence[int], cp_rank: int, cp_size: int, flash: FlashAttention | None, device: torch.device
) -> PackedAttention:
    if cp_size == 1:
        plan = plan_attention([(span, span) for span in spans], flash=flash, device=device)
        return PackedAttention(plan)
    gathered = torch.cat([_zigzag(spans, rank, cp_size) for rank in range(cp_size)])
    row_of_place = torch.empty_like(gathered)
    row_of_place[gathered] = torch.arange(gathered.numel())
    keys, entries = [], []
    for chunk_index in (cp_rank, 2 * cp_size - 1 - cp_rank):
        prefixes, start = [], 0
        for span in spans:
            chunk = span // (2 * cp_size)
            prefix = (chunk_index + 1) * chunk
            prefixes.append(row_of_place[start : start + prefix])
            entries.append((chunk, prefix))
            start += span
        keys.append(torch.cat(prefixes).to(device, non_blocking=True))
    plan = plan_attention(entries, flash=flash, device=device)
    return PackedAttention(plan, first_keys_K=keys[0], second_keys_K=keys[1])
