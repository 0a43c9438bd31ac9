"""Micro-batch plans: their guarantees for random lengths, and their quality against bounds."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.config.schema.engine import MicroBatchConfig
from fivefold.engine.packing import BatchPlanner, SequenceCost, plan_micro_batches
from fivefold.families.read import find_shape
from fivefold.layout.parser import parse_backend

COST = SequenceCost(quadratic_at=64)


def plan(lengths: list[int], **changes: Any) -> list[list[list[int]]]:
    options: dict[str, Any] = {
        "n_ranks": 2,
        "max_tokens": 100,
        "min_micro_batches": 1,
        "multiple_of": 1,
        "cost": COST,
    } | changes
    return plan_micro_batches(lengths, **options)


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 130), max_size=60),
    n_ranks=st.integers(1, 5),
    min_micro_batches=st.integers(1, 6),
    multiple_of=st.integers(1, 4),
)
def test_every_plan_keeps_its_limits_and_holds_each_sequence_once(
    lengths: list[int], n_ranks: int, min_micro_batches: int, multiple_of: int
) -> None:
    options = {"n_ranks": n_ranks, "min_micro_batches": min_micro_batches, "multiple_of": multiple_of}
    ranks = plan(lengths, **options)
    assert len(ranks) == n_ranks
    counts = {len(micro_batches) for micro_batches in ranks}
    assert len(counts) == 1
    (count,) = counts
    assert count >= min_micro_batches
    assert count % multiple_of == 0
    bins = [bin_ for micro_batches in ranks for bin_ in micro_batches]
    assert sorted(i for bin_ in bins for i in bin_) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in bin_) <= 100 or len(bin_) == 1 for bin_ in bins)
    assert all(bin_ == sorted(bin_) for bin_ in bins)
    # First-fit decreasing never leaves two bins half empty, which bounds the number of micro-batches.
    capped = [min(length, 100) for length in lengths]
    bound = max(min_micro_batches, -(-(2 * sum(capped) // 100 + 1) // n_ranks))
    assert count <= -(-bound // multiple_of) * multiple_of
    assert plan(lengths, **options) == ranks


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 130), max_size=11))
def test_fewer_sequences_than_micro_batches_get_one_each_and_empties_come_last(lengths: list[int]) -> None:
    for micro_batches in plan(lengths, n_ranks=3, min_micro_batches=4):
        sizes = [len(bin_) for bin_ in micro_batches]
        assert max(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)


def test_a_sequence_longer_than_the_limit_has_a_micro_batch_of_its_own() -> None:
    ranks = plan([250, 10, 10, 10], n_ranks=1, max_tokens=100)
    assert sorted(ranks[0]) == [[0], [1, 2, 3]]


def test_ranks_have_equal_costs_in_total_and_in_every_round() -> None:
    generator = random.Random(0)
    lengths = [min(4000, int(generator.lognormvariate(6.0, 0.8)) + 1) for _ in range(512)]
    cost = SequenceCost(quadratic_at=2000)
    ranks = plan(lengths, n_ranks=8, max_tokens=8192, cost=cost)
    costs = [[sum(cost(lengths[i]) for i in bin_) for bin_ in micro_batches] for micro_batches in ranks]
    totals = [sum(row) for row in costs]
    assert max(totals) < 1.02 * sum(totals) / len(totals)
    for round_ in zip(*costs, strict=True):
        assert max(round_) < 1.05 * sum(round_) / len(round_)
    # There are few micro-batches: at most 10% more than the tokens need, rounded up to whole rounds.
    assert len(ranks[0]) <= -(-int(1.1 * sum(lengths)) // 8192) // 8 + 1


def test_quadratic_cost_spreads_long_sequences() -> None:
    """Equal tokens are not equal time: one rank must not get both long sequences, and the other all short ones."""
    ranks = plan(
        [400, 400, 100, 100, 100, 100, 100, 100, 100, 100], max_tokens=1000, cost=SequenceCost(quadratic_at=100)
    )
    assert [sum(i < 2 for bin_ in micro_batches for i in bin_) for micro_batches in ranks] == [1, 1]


def test_perfect_packing_is_found_where_balancing_fails() -> None:
    """60 40 | 60 40 | 30 30 25 15. Balancing puts 40 with 40 and 30 with each 60, which leaves no room for 25."""
    lengths = [60, 60, 40, 40, 30, 30, 25, 15]
    ranks = plan(lengths, n_ranks=1, max_tokens=100)
    assert len(ranks[0]) == 3


def test_min_micro_batches_and_multiple_of_split_sequences_that_would_fit_together() -> None:
    assert [len(row) for row in plan([5] * 16, n_ranks=2, min_micro_batches=3, multiple_of=2)] == [4, 4]
    assert all(len(bin_) == 2 for row in plan([5] * 16, n_ranks=2, min_micro_batches=4) for bin_ in row)


def test_no_sequences_give_empty_micro_batches() -> None:
    assert plan([], n_ranks=2, multiple_of=2) == [[[], []], [[], []]]


def test_thousands_of_sequences_take_little_time() -> None:
    lengths = [random.Random(i).randint(1, 4000) for i in range(8192)]
    start = time.process_time()  # other processes do not count
    plan(lengths, n_ranks=16, max_tokens=8192)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("name", ["n_ranks", "max_tokens", "min_micro_batches", "multiple_of"])
def test_limits_below_one_are_errors(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        plan([1, 2], **{name: 0})


def test_an_empty_sequence_is_an_error() -> None:
    with pytest.raises(ValueError, match="sequence 1 has length 0"):
        plan([3, 0])


def test_no_sequence_is_longer_than_attention_is_dense() -> None:
    """An engine would compute such a sequence with dense attention, without a sign of it."""
    sparse = BatchPlanner.of_model(MicroBatchConfig(), parse_backend("megatron:d2"), find_shape("GLM-5"))
    assert sparse.plan([2048, 5]).longest == 2048
    assert sparse.plan([3000], cuts=((2000, 1000),)).longest == 3000
    with pytest.raises(ValueError, match=r"a sequence has 2049 tokens, .* at most index_topk=2048 of them"):
        sparse.plan([5, 2049])
    with pytest.raises(ValueError, match="a sequence has 2100 tokens"):
        sparse.plan([3000], cuts=((900, 2100),))
    dense = BatchPlanner.of_model(MicroBatchConfig(), parse_backend("megatron:d2"), find_shape("DeepSeek-V3"))
    assert dense.plan([5, 2049]).longest == 2049
