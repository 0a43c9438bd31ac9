"""Decides which sequences share a micro-batch, and which replica trains it, from lengths alone.

    lengths 9 7 5 4 3 2 2        2 replicas, at most 10 tokens a micro-batch
    replica 0   [9]       [5, 2]
    replica 1   [4, 3, 2] [7]       every sequence once; costs even in each round and in total

Three demands meet here. Memory: a micro-batch holds at most `max_tokens`. Lock-step: all data-parallel replicas run the
same number of micro-batches, a multiple of what the pipeline schedule needs. Speed: replicas wait for the slowest at
the gradient reduction, and at every micro-batch where experts are spread over them, so costs are evened out both in
total and micro-batch by micro-batch.

    lengths of all sequences ──BatchPlanner.plan──> BatchPlan: [replica][micro-batch] -> sequences
    the sequences of one replica, as a Batch ──────────┴──> Share ──> engine

The driver plans without holding any token, and every replica gets only its own sequences.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from fivefold.batch import Batch, Totals
from fivefold.config.schema.engine import MicroBatchConfig
from fivefold.families.shape import ModelShape
from fivefold.layout.parallel import ParallelLayout
from fivefold.types import Cuts

Key = TypeVar("Key", int, float)

Bin = list[int]
"""Indices of the sequences of one micro-batch."""

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

    layout: ParallelLayout
    max_tokens: int
    """Most tokens of a micro-batch with gradients."""
    infer_tokens: int
    """Most tokens of a micro-batch without gradients."""
    min_micro_batches: int
    quadratic_at: float
    """Length at which attention costs as much as the rest of the model."""
    longest: int | None = None
    """Tokens of a sequence beyond which attention would be sparse, which engines do not compute; None: it never is."""

    @staticmethod
    def of(config: MicroBatchConfig, layout: ParallelLayout, quadratic_at: float) -> BatchPlanner:
        """Return a planner for models whose attention is dense."""
        return BatchPlanner(layout, config.max_tokens_per_mb, config.infer_tokens, config.n_mbs, quadratic_at)

    @staticmethod
    def of_model(config: MicroBatchConfig, layout: ParallelLayout, shape: ModelShape) -> BatchPlanner:
        """Return the planner of an engine."""
        longest = None if shape.indexer is None else shape.indexer.top_k
        return replace(BatchPlanner.of(config, layout, attention_equals_rest_at(shape)), longest=longest)

    def plan(self, lengths: Sequence[int], *, with_gradient: bool = True, cuts: Cuts | None = None) -> BatchPlan:
        """Plan a mini-batch of rows of these lengths, for passes with or without gradients. Deterministic.

        The number of micro-batches is a multiple of the pipeline's stages where the schedule is interleaved.

        Args:
            lengths: tokens of each row.
            with_gradient: whether the pass computes gradients.
            cuts: tokens of each sequence of each row, which are padded each for itself; None: a row is a sequence.

        Raises:
            ValueError: a sequence is so long that the model's attention would be sparse.
        """
        rows: Sequence[Sequence[int]] = cuts or [(length,) for length in lengths]
        longest = max((length for row in rows for length in row), default=0)
        if self.longest is not None and longest > self.longest:
            raise ValueError(
                f"a sequence has {longest} tokens, and attention of the model sees at most index_topk={self.longest} "
                "of them, which is not implemented: lower the limits on prompts, answers and examples"
            )
        layout = self.layout
        assigned = plan_micro_batches(
            [self._padded(row, tp=1) for row in rows],
            n_ranks=layout.dp,
            max_tokens=self.max_tokens if with_gradient else self.infer_tokens,
            min_micro_batches=self.min_micro_batches,
            multiple_of=layout.pp if layout.vpp > 1 else 1,
            cost=SequenceCost(quadratic_at=self.quadratic_at),
        )
        replicas = tuple(tuple(map(tuple, bins)) for bins in assigned)
        longest = max(
            self._padded((length for i in bin_ for length in rows[i]), tp=layout.tp)
            for bins in replicas
            for bin_ in bins
        )
        return BatchPlan(replicas, longest)

    def _padded(self, lengths: Iterable[int], tp: int) -> int:
        return padded_tokens(lengths, cp_size=self.layout.cp, tp_size=tp)


def attention_equals_rest_at(shape: ModelShape) -> float:
    """Return the sequence length at which causal attention costs as many FLOPs per token as all else in the layers.

    Attention in sliding windows, taken to be full ones, costs the same at any length; infinity if there is no other.
    """
    mlp = shape.top_k * shape.expert_parameters if shape.is_moe else 3 * shape.hidden * shape.ffn_hidden
    matmul_flops = sum(2 * (shape.mixer_parameters(kind) + mlp) for kind in shape.layer_kinds)
    # Two for each product of scores and of weighted values, halved by causality.
    attention_flops_per_key = shape.query_width + shape.output_width
    window_flops = 2 * (shape.window or 0) * shape.n_window_layers * attention_flops_per_key
    n_quadratic = shape.n_attention_layers - shape.n_window_layers
    return (matmul_flops + window_flops) / (n_quadratic * attention_flops_per_key) if n_quadratic else math.inf


def padded_tokens(lengths: Iterable[int], *, cp_size: int, tp_size: int) -> int:
    """Return the number of tokens of a micro-batch over its context-parallel group, filler included; at least 1."""
    unit = chunk_unit(cp_size)
    total = sum(round_up(length, unit) for length in lengths)
    return round_up(max(total, 1), math.lcm(unit, cp_size * tp_size))


def chunk_unit(cp_size: int) -> int:
    """Return what the padded length of a sequence is a multiple of: context-parallel ranks hold two chunks each."""
    return 2 * cp_size if cp_size > 1 else 1


def round_up(value: int, unit: int) -> int:
    """Return the least multiple of `unit` that is at least `value`."""
    return -(-value // unit) * unit


@dataclass(frozen=True)
class SequenceCost:
    """Relative cost of a sequence: linear layers grow with its length, attention with the square of it."""

    quadratic_at: float
    """Length at which attention costs as much as everything else together."""

    def __call__(self, length: int) -> float:
        return length * (1.0 + length / self.quadratic_at)


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    n_ranks: int,
    max_tokens: int,
    min_micro_batches: int,
    multiple_of: int,
    cost: Callable[[int], float],
) -> list[list[Bin]]:
    """Split sequences into micro-batches and deal them to the data-parallel ranks. Deterministic.

    Args:
        lengths: tokens of each sequence, as they will lie in memory (alignment padding included).
        n_ranks: data-parallel ranks.
        max_tokens: most tokens in a micro-batch. A longer sequence gets a micro-batch to itself.
        min_micro_batches: fewest micro-batches on a rank.
        multiple_of: the number of micro-batches on a rank is a multiple of this.
        cost: relative time that a sequence of a given length takes; grows with the length.

    Returns:
        `[rank][micro-batch] -> indices into lengths`, in rising order. Each index appears exactly once, each rank has
        the same number of micro-batches, and costly micro-batches come first. If there are fewer sequences than
        micro-batches, the last ones are empty.

        There are at most as many micro-batches over all ranks as bins in first-fit-decreasing bin packing, which is
        within 11/9 of the optimum + 2/3 (Dósa 2007), rounded up for the other two demands.

    Raises:
        ValueError: a length, rank count or limit below 1.
    """
    limits = {
        "n_ranks": n_ranks,
        "max_tokens": max_tokens,
        "min_micro_batches": min_micro_batches,
        "multiple_of": multiple_of,
    }
    for name, value in limits.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if lengths and min(lengths) < 1:
        raise ValueError(
            f"sequence {lengths.index(min(lengths))} has length {min(lengths)}; a sequence has at least 1 token"
        )

    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    first_fit: list[Bin] | None = None
    n_per_rank = round_up(max(min_micro_batches, -(-_fewest_bins(lengths, max_tokens) // n_ranks)), multiple_of)
    while (bins := _balance(longest_first, lengths, n_ranks * n_per_rank, max_tokens, cost)) is None:
        # First-fit is rarely needed, because most lengths can be balanced.
        first_fit = first_fit or _first_fit(longest_first, lengths, max_tokens)
        if len(first_fit) <= n_ranks * n_per_rank:
            # Bins that must be packed this tightly are nearly full, and hence nearly even without balancing.
            bins = first_fit + [[] for _ in range(n_ranks * n_per_rank - len(first_fit))]
            break
        n_per_rank += multiple_of
    return _deal(bins, [sum(cost(lengths[i]) for i in bin_) for bin_ in bins], n_ranks)


def _fewest_bins(lengths: Sequence[int], max_tokens: int) -> int:
    """Return a lower bound on the number of bins, from the long sequences and the tokens of the others."""
    n_long = sum(length >= max_tokens for length in lengths)
    return n_long + -(-sum(length for length in lengths if length < max_tokens) // max_tokens)


class _Bins(Generic[Key]):
    """Bins with a capacity. They find the one with the least key that has room, for sequences from long to short.

    A bin without room is set aside until a sequence is short enough for it, so that each sequence moves only a few
    bins, however many are full.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._open: list[tuple[Key, int, int]] = []
        """A heap of (key, tokens, bin)."""
        self._full: list[tuple[int, Key, int, int]] = []
        """A heap of (-room, key, tokens, bin)."""

    def add(self, key: Key, tokens: int, number: int) -> None:
        """Add a bin, or put one back after `take`."""
        heapq.heappush(self._open, (key, tokens, number))

    def take(self, length: int) -> tuple[Key, int, int] | None:
        """Remove the bin with the least key that has room for `length`: its key, tokens and number; None if none has.

        An empty bin has room for any sequence. Lengths must not grow from call to call.
        """
        while self._full and -self._full[0][0] >= length:
            heapq.heappush(self._open, heapq.heappop(self._full)[1:])
        while self._open and self._open[0][1] and self._open[0][1] + length > self._capacity:
            key, tokens, number = heapq.heappop(self._open)
            heapq.heappush(self._full, (tokens - self._capacity, key, tokens, number))
        return heapq.heappop(self._open) if self._open else None


def _first_fit(longest_first: list[int], lengths: Sequence[int], max_tokens: int) -> list[Bin]:
    """Pack by first-fit decreasing: few bins, of uneven cost."""
    bins: list[Bin] = []
    rooms: _Bins[int] = _Bins(max_tokens)
    for i in longest_first:
        number, tokens, _ = rooms.take(lengths[i]) or (len(bins), 0, 0)
        if number == len(bins):
            bins.append([])
        bins[number].append(i)
        rooms.add(number, tokens + lengths[i], number)
    return bins


def _balance(
    longest_first: list[int], lengths: Sequence[int], n_bins: int, max_tokens: int, cost: Callable[[int], float]
) -> list[Bin] | None:
    """Put each sequence, longest first, into the cheapest bin with room (Graham 1969, with a cap); None if none has."""
    bins: list[Bin] = [[] for _ in range(n_bins)]
    rooms: _Bins[float] = _Bins(max_tokens)
    for number in range(n_bins):
        rooms.add(0.0, 0, number)
    for i in longest_first:
        if (cheapest := rooms.take(lengths[i])) is None:
            return None
        bin_cost, tokens, number = cheapest
        bins[number].append(i)
        rooms.add(bin_cost + cost(lengths[i]), tokens + lengths[i], number)
    return bins


def _deal(bins: list[Bin], costs: list[float], n_ranks: int) -> list[list[Bin]]:
    """Deal bins of similar cost to the ranks, round by round; the rank with the least total gets the costliest."""
    order = sorted(range(len(bins)), key=lambda b: (-costs[b], b))
    plan: list[list[Bin]] = [[] for _ in range(n_ranks)]
    totals = [0.0] * n_ranks
    for start in range(0, len(order), n_ranks):
        ranks = sorted(range(n_ranks), key=lambda rank: (totals[rank], rank))
        for rank, b in zip(ranks, order[start : start + n_ranks], strict=True):
            plan[rank].append(sorted(bins[b]))
            totals[rank] += costs[b]
    return plan
