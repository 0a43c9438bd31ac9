"""Metrics of many ranks, which are joined as arrays, have the bits of those that are merged one by one."""

from __future__ import annotations

import math
import pickle
import random
from typing import get_args

import pytest

from fivefold.algorithms.metrics import Metric, Metrics, Reduction, merge_metrics
from fivefold.engine.metrics import Part, join_parts

NAMES = {f"{reduction}/{number}": reduction for reduction in get_args(Reduction) for number in range(3)}


def metrics_of(rank: int, seed: int) -> Metrics:
    draw = random.Random(f"{seed}-{rank}").uniform
    return {
        name: Metric(draw(-1e3, 1e3), float(rank % 3), reduction, draw(0, 1e3)) for name, reduction in NAMES.items()
    }


@pytest.mark.parametrize("n_ranks", [1, 2, 37])
def test_ranks_of_the_same_names_are_joined_bit_for_bit(n_ranks: int) -> None:
    ranks = [metrics_of(rank, n_ranks) for rank in range(n_ranks)]
    sent = [pickle.loads(pickle.dumps(Part.of(metrics))) for metrics in ranks]
    assert join_parts(sent) == merge_metrics(ranks)


def test_ranks_of_other_names_or_in_another_order_are_joined_too() -> None:
    first, second, third = (metrics_of(rank, 0) for rank in range(3))
    del second["max/1"]
    third = dict(reversed(third.items()))
    assert join_parts([Part.of(each) for each in (first, second, third)]) == merge_metrics([first, second, third])
    assert join_parts([]) == {}


def test_a_largest_value_of_no_token_stays_without_a_value() -> None:
    nothing = {"ratio/max": Metric(-math.inf, 0.0, "max")}
    found = join_parts([Part.of(nothing)] * 3)
    assert found == nothing
    assert found["ratio/max"].value is None
