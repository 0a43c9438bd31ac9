"""Decides which sequences share a micro-batch, and which rank trains it.

    lengths 9 7 5 4 3 2 2        2 ranks, at most 10 tokens a micro-batch
    rank 0   [9]       [5, 2]
    rank 1   [4, 3, 2] [7]       every sequence once; costs even in each round and in total

Three demands meet here. Memory: a micro-batch holds at most `max_tokens`. Lock-step: all data-parallel ranks run
the same number of micro-batches, a multiple of what the pipeline schedule needs. Speed: ranks wait for the slowest
at the gradient reduction, and at every micro-batch where experts are spread over them, so costs are evened out over
ranks both in total and micro-batch by micro-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", int, float)

Bin = list[int]
"""Indices of the sequences of one micro-batch."""


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
    """Split sequences into micro-batches and deal those to the data-parallel ranks. Deterministic.

    Args:
        lengths: tokens of each sequence, as they will lie in memory (alignment padding included).
        n_ranks: data-parallel ranks.
        max_tokens: most tokens in a micro-batch. A sequence that is longer gets a micro-batch of its own.
        min_micro_batches: fewest micro-batches on a rank.
        multiple_of: the number of micro-batches on a rank is a multiple of this.
        cost: relative time that a sequence of a given length takes; grows with the length.

    Returns:
        `[rank][micro-batch] -> indices into lengths`, in rising order. Each index appears exactly once, each rank has
        the same number of micro-batches, and costly micro-batches come first. If there are fewer sequences than
        micro-batches, the last ones are empty.

        The number of micro-batches over all ranks is at most that of first-fit-decreasing bin packing, which is
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
    n_per_rank = _round_up(max(min_micro_batches, -(-_fewest_bins(lengths, max_tokens) // n_ranks)), multiple_of)
    while (bins := _balance(longest_first, lengths, n_ranks * n_per_rank, max_tokens, cost)) is None:
        # First-fit is rarely needed, because most lengths can be balanced.
        first_fit = first_fit or _first_fit(longest_first, lengths, max_tokens)
        if len(first_fit) <= n_ranks * n_per_rank:
            # Bins that must be packed this tightly are nearly full, and hence nearly even without balancing.
            bins = first_fit + [[] for _ in range(n_ranks * n_per_rank - len(first_fit))]
            break
        n_per_rank += multiple_of
    return _deal(bins, [sum(cost(lengths[i]) for i in bin_) for bin_ in bins], n_ranks)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


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
