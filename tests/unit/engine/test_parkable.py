"""Tensors whose device memory is given back for a while."""

from __future__ import annotations

import pytest
import torch

from fivefold.engine.state.parkable import Parkable


def test_parts_of_a_parked_tensor_are_read() -> None:
    tensor = torch.arange(30, dtype=torch.int16).view(5, 6)
    values = tensor.clone()
    parked = Parkable(tensor)
    assert parked.park(keep_values=True) == 60
    for first in range(5):
        for last in range(first + 1, 6):
            read = parked.read(12 * first, 12 * last).view(torch.int16).view(-1, 6)
            assert torch.equal(read, values[first:last])
    assert tensor.untyped_storage().nbytes() == 0
    assert parked.fetch(keep_values=True) == 60
    assert torch.equal(tensor, values)


@pytest.mark.parametrize("is_constant", [True, False])
def test_only_a_tensor_that_may_change_is_copied_each_time(is_constant: bool) -> None:
    tensor = torch.zeros(10)
    parked = Parkable(tensor, is_constant=is_constant)
    parked.park(keep_values=True)
    parked.fetch(keep_values=True)
    tensor.fill_(7)
    parked.park(keep_values=True)
    assert parked.read(0, 40).view(torch.float32).tolist() == [0 if is_constant else 7] * 10
