"""What travels together in an export."""

from __future__ import annotations

import pytest
import torch

from fivefold.bridge.export import Item
from fivefold.bridge.mapping import WeightMapping, mapping_of
from fivefold.bridge.participants import RankGroups, parts
from fivefold.families.tensors import WeightTensor
from fivefold.weights.stream import unstacked

N_EXPERTS, FFN, HIDDEN = 12, 6, 5
GATE_UP = [
    WeightTensor(f"experts.{{expert}}.{name}", (FFN, HIDDEN), "rows", n_experts=N_EXPERTS) for name in ("gate", "up")
]
UP = mapping_of("up", *GATE_UP)
DOWN = mapping_of("down", WeightTensor("experts.{expert}.down", (HIDDEN, FFN), "columns", n_experts=N_EXPERTS))


@pytest.mark.parametrize(("mapping", "shape"), [(UP, (4, FFN, HIDDEN)), (DOWN, (4, HIDDEN, FFN // 2))])
@pytest.mark.parametrize("max_bytes", [1, 3 * 2 * 2 * 2 * FFN * HIDDEN, 10**6])
def test_experts_travel_in_slices_that_fit(mapping: WeightMapping, shape: tuple[int, ...], max_bytes: int) -> None:
    """Three ranks have four experts each, cut over two ranks; merged, the slices are the whole parameter."""
    shards = torch.randn(6, *shape).bfloat16()
    whole = Item(mapping, 0, shape, torch.bfloat16, 6)
    slices = list(whole.slices(max_bytes))
    assert all(item.nbytes <= max_bytes or item.shape[0] == 1 for item in slices)
    assert len(slices) == {1: 4, 10**6: 1}.get(max_bytes, len(slices))
    assert sum(item.nbytes for item in slices) == whole.nbytes
    stacks = [
        stack
        for item in slices
        for stack in item.merged(shards[:, item.first : item.first + item.shape[0]].contiguous())
    ]
    assert len(stacks) == 3 * len(slices), "the experts of a slice that come from one rank are in one stack"
    merged = list(unstacked(stacks))
    expected = dict(unstacked(mapping.merge(shards)))
    assert len(merged) == len(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in merged)


def test_a_parameter_without_experts_travels_whole() -> None:
    item = Item(mapping_of("o", WeightTensor("o_proj", (4, 8), "columns")), 0, (4, 4), torch.float32, 2)
    assert list(item.slices(1)) == [item]


def test_a_reader_that_is_no_rank_is_refused() -> None:
    alone = RankGroups((0,), (0,), (0,), (0,))
    with pytest.raises(ValueError, match=r"ranks \[3\] are to read the weights, but there are 1 ranks"):
        parts([alone], frozenset({0, 3}))
