"""Mini-batches hold whole groups."""

from __future__ import annotations

import pytest

from fivefold.update.step import minibatches


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


@pytest.mark.parametrize(("n_groups", "n", "sizes"), [(3, 2, [1, 2]), (7, 3, [2, 2, 3]), (2, 4, [1, 1])])
def test_a_group_that_is_missing_leaves_the_others_in_mini_batches(n_groups: int, n: int, sizes: list[int]) -> None:
    split = minibatches([group for group in range(n_groups) for _ in range(2)], n, seed="")
    assert sorted(len(indices) // 2 for indices in split) == sizes
    assert sorted(index for indices in split for index in indices) == list(range(2 * n_groups))
