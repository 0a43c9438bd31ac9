"""From one ragged batch to the micro-batches of this rank, equal in number on all data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fivefold.config.schema import MicroBatchConfig
from fivefold.engine.packing import SequenceCost, plan_micro_batches
from fivefold.engine.sequences import LocalSequences, localize, padded_tokens
from fivefold.families.shape import ModelShape
from fivefold.layout.parallel import ParallelLayout
from fivefold.types import Batch


@dataclass(frozen=True)
class MicroBatch:
    """Whole sequences that go through the model together."""

    rows_T: torch.Tensor
    """int64 [T], CPU: where these tokens stand in the whole batch."""
    batch: Batch
    """The sequences, on the device. May be empty, where there are fewer sequences than micro-batches."""
    local: LocalSequences
    """This context-parallel rank's tokens of them."""
    padded: int
    """Tokens over the context-parallel group, filler included."""


@dataclass(frozen=True)
class MicroBatchPlanner:
    """What the split of a batch depends on, besides the batch."""

    config: MicroBatchConfig
    layout: ParallelLayout
    dp_rank: int
    """Of this process, among the data-parallel ranks."""
    cp_rank: int
    """Of this process, in its context-parallel group."""
    quadratic_at: float
    """Length at which attention costs as much as the rest of the model."""
    same_length: bool
    """Whether every micro-batch of every rank must be padded to the longest one."""
    flash: bool
    device: torch.device

    def split(self, batch: Batch) -> list[MicroBatch]:
        """The micro-batches of this data-parallel rank: a multiple of the pipeline's stages where it is interleaved."""
        tp, cp = self.layout.tp, self.layout.cp
        assigned = plan_micro_batches(
            [padded_tokens([length], cp_size=cp, tp_size=1) for length in batch.lengths],
            n_ranks=self.layout.dp,
            max_tokens=self.config.max_tokens_per_mb,
            min_micro_batches=self.config.n_mbs,
            multiple_of=self.layout.pp if self.layout.vpp > 1 else 1,
            cost=SequenceCost(quadratic_at=self.quadratic_at),
        )
        totals = [
            [padded_tokens([batch.lengths[i] for i in bin_], cp_size=cp, tp_size=tp) for bin_ in bins]
            for bins in assigned
        ]
        longest = max(total for row in totals for total in row)
        return [
            self._micro_batch(batch, bin_, longest if self.same_length else total)
            for bin_, total in zip(assigned[self.dp_rank], totals[self.dp_rank], strict=True)
        ]

    def _micro_batch(self, batch: Batch, indices: list[int], total: int) -> MicroBatch:
        offsets = batch.offsets()
        rows = [torch.arange(offsets[i], offsets[i + 1]) for i in indices]
        chosen = batch.select(indices)
        local = localize(
            chosen,
            cp_rank=self.cp_rank,
            cp_size=self.layout.cp,
            total=total,
            flash=self.flash,
            device=self.device,
        )
        return MicroBatch(
            rows_T=torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64),
            batch=chosen.to(self.device),
            local=local,
            padded=total,
        )


def attention_equals_rest_at(shape: ModelShape) -> float:
    """Sequence length at which causal attention costs as many FLOPs a token as the layers' matmuls."""
    mlp = shape.top_k * shape.expert_parameters if shape.is_moe else 3 * shape.hidden * shape.ffn_hidden
    matmul_flops = 2 * (shape.attention_parameters + mlp)
    attention_flops_per_key = 2 * shape.n_heads * shape.head_dim  # 4 for the two products, halved by causality
    return matmul_flops / attention_flops_per_key
