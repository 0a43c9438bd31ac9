"""The micro-batches that a rank puts through the model: whole sequences, packed end to end, and this rank's part.

    ragged   aaaaaaa bbb             sequences end to end
    padded   aaaaaaa. bbb. ........  each to a multiple of 2 * cp; a filler sequence makes the total even

Context-parallel ranks split the padded sequences (`context_parallel.py`). The loss gets whole sequences again:
predictions return to their places in the ragged batch (`LocalSequences.places_N`) and are summed over the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fivefold.batch import Batch
from fivefold.config.schema.engine import FlashAttention
from fivefold.engine.context_parallel import PackedAttention, gathered_keys, zigzag, zigzag_attention
from fivefold.engine.kernels.varlen import plan_attention, varlen_attention
from fivefold.engine.packing import Share, chunk_unit, padded_tokens, round_up
from fivefold.engine.routes import LocalRoutes
from fivefold.layout.parallel import ParallelLayout
from fivefold.types import ROUTES

if TYPE_CHECKING:
    from fivefold.vision.local import LocalImages


@dataclass(frozen=True)
class LocalSequences:
    """This rank's part of one micro-batch. T: its tokens. N: the tokens that it predicts."""

    tokens_T: torch.Tensor
    """int64 [T]: token ids."""
    positions_T: torch.Tensor
    """int64 [T]: position of each token in its sequence."""
    padding_T: torch.Tensor
    """bool [T]: true on filler."""
    sequences_T: torch.Tensor
    """int64 [T]: index of each token's sequence, to which the filler at its end belongs."""
    n_sequences: int
    """Sequences of the micro-batch, a filler sequence included."""
    attention: PackedAttention
    rows_N: torch.Tensor
    """int64 [N]: rows of the hidden states that predict a trained token."""
    targets_N: torch.Tensor
    """int64 [N]: the tokens they predict."""
    places_N: torch.Tensor
    """int64 [N]: indices of these tokens in the ragged batch."""
    sources_T: torch.Tensor
    """int64 [T], CPU: index of each token in the ragged batch; -1: filler."""
    routes: LocalRoutes | None = None
    """The experts to which routers send the tokens; None: routers choose, and nothing is recorded."""
    images: LocalImages | None = None
    """The images among the tokens; None: there are none."""


@dataclass(frozen=True)
class MicroBatch:
    """Whole sequences that go through the model together."""

    rows_T: torch.Tensor
    """int64 [T], CPU: index of each token in the share's batch."""
    batch: Batch
    """The sequences, on the device; empty if there are fewer sequences than micro-batches."""
    local: LocalSequences
    """This context-parallel rank's tokens of them."""
    padded: int
    """Number of tokens over the context-parallel group, filler included."""


@dataclass(frozen=True)
class MicroBatchBuilder:
    """Builds one rank's micro-batches from its shares."""

    layout: ParallelLayout
    cp_rank: int
    """Index of this process in its context-parallel group."""
    same_length: bool
    """Whether every micro-batch of every rank must be padded to the longest one."""
    flash: FlashAttention | None
    """Flash attention's kernels, which need their own plan; None: PyTorch's scaled dot-product attention."""
    device: torch.device
    moe_layers: tuple[int, ...] | None = None
    """Index of each MoE layer of this rank among all of the model, if routes are recorded and replayed."""

    def build(self, share: Share) -> list[MicroBatch]:
        """Return the micro-batches of a share, in the order in which they are trained."""
        return [self._build_one(share, indices) for indices in share.micro_batches]

    def _build_one(self, share: Share, indices: tuple[int, ...]) -> MicroBatch:
        chosen = share.batch.without(ROUTES).select(indices)
        tp, cp = self.layout.tp, self.layout.cp
        total = share.longest if self.same_length else padded_tokens(chosen.sequence_lengths, cp_size=cp, tp_size=tp)
        local = localize(chosen, cp_rank=self.cp_rank, cp_size=cp, total=total, flash=self.flash, device=self.device)
        offsets = share.batch.offsets()
        rows = [torch.arange(offsets[i], offsets[i + 1]) for i in indices]
        rows_T = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)
        if self.moe_layers is not None:
            # Index -1, filler, reads the extra element at the end.
            sources_T = torch.cat([rows_T, rows_T.new_full((1,), -1)])[local.sources_T]
            routes = LocalRoutes.of(share.batch, sources_T, self.moe_layers, self.device)
            local = replace(local, routes=routes)
        return MicroBatch(rows_T, chosen.to(self.device), local, total)


def localize(
    batch: Batch, *, cp_rank: int, cp_size: int, total: int, flash: FlashAttention | None, device: torch.device
) -> LocalSequences:
    """Pad `batch` to `total` tokens (see `padded_tokens`) and take the part of context-parallel rank `cp_rank`.

    Only tokens whose mask is not 0 are predicted.
    """
    spans = [round_up(length, chunk_unit(cp_size)) for length in batch.sequence_lengths]
    lengths = list(batch.sequence_lengths)
    if total > sum(spans):
        spans.append(total - sum(spans))
        lengths.append(0)
    place = _places(spans, lengths)
    successor = torch.cat([place[1:], place.new_full((1,), -1)])
    successor[torch.tensor(spans).cumsum(0) - 1] = -1
    if cp_size > 1:
        local = zigzag(spans, cp_rank, cp_size)
        attention = zigzag_attention(spans, cp_rank, cp_size, flash, device)
    else:
        local = torch.arange(sum(spans))
        plan = plan_attention([(span, span) for span in spans], flash=flash, device=device)
        attention = PackedAttention(plan, spans=tuple(spans))
    # Index -1, filler, reads the extra element at the end: token 0, not trained.
    tokens = torch.cat([batch.tokens_T, batch.tokens_T.new_zeros(1)])
    trained = torch.cat([batch.mask_T > 0, torch.zeros(1, dtype=torch.bool)])
    rows = trained[successor[local]].nonzero().flatten()
    places = successor[local][rows]

    images = None
    if batch.images is not None and any(batch.images):
        from fivefold.vision.local import LocalImages  # by batches that have images

        images = LocalImages.of(batch.images, batch.lengths, spans, place[local], local).to(device)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    return LocalSequences(
        tokens_T=move(tokens[place[local]]),
        positions_T=move(torch.cat([torch.arange(span) for span in spans])[local]),
        padding_T=move(place[local] < 0),
        sequences_T=move(torch.arange(len(spans)).repeat_interleave(torch.tensor(spans))[local]),
        n_sequences=len(spans),
        attention=attention,
        rows_N=move(rows),
        targets_N=move(batch.tokens_T[places]),
        places_N=move(places),
        sources_T=place[local],
        images=images,
    )


def _places(spans: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    """Return int64 [total]: the index of each padded token in the ragged batch, -1 for filler."""
    place = torch.full((sum(spans),), -1, dtype=torch.int64)
    start, source = 0, 0
    for span, length in zip(spans, lengths, strict=True):
        place[start : start + length] = torch.arange(source, source + length)
        start, source = start + span, source + length
    return place


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedAttention,
    cp_group: dist.ProcessGroup,
    scale: float | None = None,
    *,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from query [T, heads, d] with key [T, kv_heads, d] and value [T, kv_heads, v], all of this rank's tokens.

    The queries see the keys of the whole context-parallel group; `scale`, `window` and `sinks` are as in
    `varlen_attention`.

    Returns:
        [T, heads, v].
    """
    if cp_group.size() > 1:
        widths = (key.shape[-1], value.shape[-1])
        key, value = gathered_keys(torch.cat((key, value), dim=-1), packed, cp_group).split(widths, dim=-1)
    return varlen_attention(query, key, value, packed.plan, scale, window=window, sinks=sinks)
