"""The gated delta rule on a GPU: in torch, where deterministic mode refuses some operations, and by fla-core."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fivefold.engine.kernels.fla_delta_rule import computes, fla_gated_delta_rule
from fivefold.families.fla_core import missing
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


@pytest.mark.parametrize("per_head", [1, 2])
def test_torch_has_the_precision_of_bfloat16_inputs(per_head: int) -> None:
    check_delta_rule(per_head, "cuda", dtype=torch.bfloat16, widths=(128, 128), error=1e-2)


@pytest.mark.skipif(missing() is not None, reason=missing() or "")
@pytest.mark.parametrize("per_head", [2, 1])
def test_fla_core_computes_the_recurrence(per_head: int) -> None:
    key, value = (torch.empty(1, n_heads, 128, device="cuda", dtype=torch.bfloat16) for n_heads in (2, 2 * per_head))
    assert computes(key, value)
    check_delta_rule(per_head, "cuda", fla_gated_delta_rule, torch.bfloat16, (128, 128), error=2e-2)
