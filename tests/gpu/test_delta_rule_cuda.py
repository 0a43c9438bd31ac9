"""The gated delta rule on a GPU, where torch's deterministic mode refuses some operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.unit.engine.recurrence import check_delta_rule

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(params=[False, True], ids=["usual", "deterministic"])
def mode(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("mode")
@pytest.mark.parametrize("per_head", [1, 3])
def test_outputs_and_gradients_are_those_of_the_recurrence(per_head: int) -> None:
    check_delta_rule(per_head, "cuda")
