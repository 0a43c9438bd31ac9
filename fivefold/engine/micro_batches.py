"""Builds the micro-batches that a rank puts through the model, from its replica's share of a mini-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fivefold.config.schema.engine import FlashAttention
from fivefold.engine.sequences import LocalSequences, localize, padded_tokens
from fivefold.engine.sharing import Share
from fivefold.layout.parallel import ParallelLayout
from fivefold.types import Batch


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
    """Kernels of flash attention, which has a plan of its own; None: attention runs on others."""
    device: torch.device

    def build(self, share: Share) -> list[MicroBatch]:
        """Return the micro-batches of a share, in the order in which they are trained."""
        return [self._build_one(share, indices) for indices in share.micro_batches]

    def _build_one(self, share: Share, indices: tuple[int, ...]) -> MicroBatch:
        chosen = share.batch.select(indices)
        tp, cp = self.layout.tp, self.layout.cp
        total = share.longest if self.same_length else padded_tokens(chosen.lengths, cp_size=cp, tp_size=tp)
        local = localize(chosen, cp_rank=self.cp_rank, cp_size=cp, total=total, flash=self.flash, device=self.device)
        offsets = share.batch.offsets()
        rows = [torch.arange(offsets[i], offsets[i + 1]) for i in indices]
        return MicroBatch(
            rows_T=torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64),
            batch=chosen.to(self.device),
            local=local,
            padded=total,
        )
