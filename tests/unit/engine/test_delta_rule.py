"""The gated delta rule by chunks against its recurrence, token by token and in double precision."""

from __future__ import annotations

import pytest
import torch

from fivefold.engine.kernels.delta_rule import packed_convolution
from tests.unit.engine.recurrence import SPANS, check_delta_rule


@pytest.mark.parametrize("per_head", [1, 3])
def test_outputs_and_gradients_are_those_of_the_recurrence(per_head: int) -> None:
    check_delta_rule(per_head, "cpu")


def test_a_convolution_sees_nothing_before_its_sequence() -> None:
    x_TC, weight_C1K = torch.randn(sum(SPANS), 6), torch.randn(6, 1, 4)
    wanted = []
    for sequence_LC in x_TC.split(list(SPANS)):
        for t in range(len(sequence_LC)):
            seen = [sequence_LC[t - back] * weight_C1K[:, 0, 3 - back] for back in range(min(t + 1, 4))]
            wanted.append(torch.stack(seen).sum(0))
    torch.testing.assert_close(packed_convolution(x_TC, weight_C1K, SPANS), torch.stack(wanted))
