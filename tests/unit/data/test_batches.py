"""Mini-batches hold whole groups."""

from __future__ import annotations

import pytest

from fivefold.data.batches import minibatches


def test_minibatches_hold_whole_groups_and_each_sample_once() -> None:
    groups = [9, 4, 9, 1, 4, 7, 1, 7, 7]
    split = minibatches(groups, 2, seed="1-0-0")
    assert sorted(i for indices in split for i in indices) == list(range(9))
    members = [{groups[i] for i in indices} for indices in split]
    assert [len(m) for m in members] == [2, 2]
    assert not members[0] & members[1]
    assert all(indices == sorted(indices) for indices in split)
    assert minibatches(groups, 2, seed="1-0-0") == split
    assert len({str(minibatches(groups, 2, seed=str(s))) for s in range(20)}) > 2
    assert minibatches(groups, 1, seed="any") == [list(range(9))]


def test_groups_that_do_not_divide_into_mini_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="3 groups cannot be split into 2 mini-batches"):
        minibatches([0, 0, 1, 2], 2, seed="")
