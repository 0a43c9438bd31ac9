"""Splits mini-batches over data-parallel replicas and their micro-batches.

    lengths of all sequences ──BatchPlanner.plan──> BatchPlan: [replica][micro-batch] -> sequences
                                                        │
    the sequences of one replica, as a Batch  ──────────┴──> Share ──> engine

The plan needs only lengths, so the driver can make it without holding any token, and every replica gets only its own
sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fivefold.config.schema.engine import EngineConfig, MicroBatchConfig
from fivefold.engine.packing import SequenceCost, plan_micro_batches
from fivefold.engine.sequences import padded_tokens
from fivefold.families.shape import ModelShape
from fivefold.layout.parallel import ParallelLayout
from fivefold.types import Batch, Totals

MicroBatches = tuple[tuple[int, ...], ...]
"""Indices of the sequences of each micro-batch."""


@dataclass(frozen=True)
class Share:
    """One replica's part of a mini-batch, and the sizes of the whole. All ranks of a replica get the same share."""

    batch: Batch
    """The replica's own sequences."""
    micro_batches: MicroBatches
    """Indices into `batch`, each exactly once. Every replica has equally many micro-batches; some may be empty."""
    longest: int
    """Tokens of the longest micro-batch of any replica, filler included."""
    totals: Totals
    """Sizes of the whole mini-batch."""


@dataclass(frozen=True)
class BatchPlan:
    """Which sequences of a mini-batch each replica trains, and in which micro-batches."""

    replicas: tuple[MicroBatches, ...]
    """`[replica][micro-batch]` -> indices into the mini-batch, each exactly once."""
    longest: int
    """Tokens of the longest micro-batch, filler included."""

    def sequences(self, replica: int) -> tuple[int, ...]:
        """Return the mini-batch's indices of the sequences of `replica`, in the order in which it holds them."""
        return tuple(index for micro_batch in self.replicas[replica] for index in micro_batch)

    def micro_batches(self, replica: int) -> MicroBatches:
        """Return the micro-batches of `replica`, as indices into its own sequences."""
        split, start = [], 0
        for micro_batch in self.replicas[replica]:
            split.append(tuple(range(start, start + len(micro_batch))))
            start += len(micro_batch)
        return tuple(split)

    def share(self, batch: Batch, replica: int) -> Share:
        """Return the share of `replica` in the whole mini-batch `batch`."""
        own = batch.select(self.sequences(replica))
        return Share(own, self.micro_batches(replica), self.longest, batch.totals())


@dataclass(frozen=True)
class BatchPlanner:
    """Plans mini-batches from the lengths of their sequences."""

    config: MicroBatchConfig
    layout: ParallelLayout
    quadratic_at: float
    """Length at which attention costs as much as the rest of the model."""

    @staticmethod
    def of(config: EngineConfig, layout: ParallelLayout, shape: ModelShape) -> BatchPlanner:
        """Return the planner of an engine."""
        return BatchPlanner(config.mb_spec, layout, attention_equals_rest_at(shape))

    def plan(self, lengths: Sequence[int], *, with_gradient: bool = True) -> BatchPlan:
        """Plan a mini-batch of sequences of these lengths, for passes with or without gradients. Deterministic.

        The number of micro-batches is a multiple of the pipeline's stages where the schedule is interleaved.
        """
        layout, config = self.layout, self.config
        assigned = plan_micro_batches(
            [self._padded([length], tp=1) for length in lengths],
            n_ranks=layout.dp,
            max_tokens=config.max_tokens_per_mb if with_gradient else config.infer_tokens,
            min_micro_batches=config.n_mbs,
            multiple_of=layout.pp if layout.vpp > 1 else 1,
            cost=SequenceCost(quadratic_at=self.quadratic_at),
        )
        replicas = tuple(tuple(map(tuple, bins)) for bins in assigned)
        longest = max(self._padded((lengths[i] for i in bin_), tp=layout.tp) for bins in replicas for bin_ in bins)
        return BatchPlan(replicas, longest)

    def _padded(self, lengths: Iterable[int], tp: int) -> int:
        return padded_tokens(lengths, cp_size=self.layout.cp, tp_size=tp)


def attention_equals_rest_at(shape: ModelShape) -> float:
    """Return the sequence length at which causal attention costs as many FLOPs per token as the layers' matmuls."""
    mlp = shape.top_k * shape.expert_parameters if shape.is_moe else 3 * shape.hidden * shape.ffn_hidden
    matmul_flops = 2 * (shape.attention_parameters + mlp)
    # Two for each product of scores and of weighted values, halved by causality.
    attention_flops_per_key = shape.query_width + shape.output_width
    return matmul_flops / attention_flops_per_key
