"""The critic's loss is the clipped squared error of PPO, summed so that it can be split in any way."""

from __future__ import annotations

import pytest
import torch

from fivefold.algorithms.loss import LossInputs
from fivefold.algorithms.value_loss import ValueLoss
from fivefold.batch import Totals

MASK = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0])
VALUES = torch.tensor([torch.nan, 0.0, 2.0, 9.0, -1.0])
OLD = torch.tensor([torch.nan, 0.1, 1.0, 9.0, -1.2])
RETURNS = torch.tensor([torch.nan, 1.0, 0.0, 9.0, 0.0])
LENGTHS = (3, 2)
TOTALS = Totals(2, 5, 3, 2)


def run(loss: ValueLoss) -> tuple[torch.Tensor, dict[str, float], torch.Tensor]:
    """Return the loss of the whole batch, its metrics and the gradient of the values."""
    values = VALUES.clone().requires_grad_()
    total, metrics = loss(LossInputs({"values": values}, MASK, LENGTHS, {"values": OLD, "returns": RETURNS}))
    (total / loss.normalizer(TOTALS)).backward()
    assert values.grad is not None
    return (
        total.detach() / loss.normalizer(TOTALS),
        {name: float(metric.sum) for name, metric in metrics.items()},
        values.grad,
    )


def test_the_error_is_squared_and_halved() -> None:
    loss, metrics, gradient = run(ValueLoss(None, "token_mean"))
    assert float(loss) == pytest.approx((1.0 + 4.0 + 1.0) / 2 / 3)
    assert metrics["value_loss"] == pytest.approx(3.0)
    assert metrics["clip_fraction"] == 0
    torch.testing.assert_close(gradient, torch.tensor([0.0, -1.0, 2.0, 0.0, -1.0]) / 3)


def test_a_value_that_has_moved_too_far_towards_its_return_has_no_gradient() -> None:
    # The third value went up from -1.2 to -1.0, and may go up by 0.1 only: (-1.1)^2 > (-1.0)^2.
    loss, metrics, gradient = run(ValueLoss(0.1, "token_mean"))
    assert float(loss) == pytest.approx((1.0 + 4.0 + 1.1**2) / 2 / 3)
    assert metrics["clip_fraction"] == 1
    torch.testing.assert_close(gradient, torch.tensor([0.0, -1.0, 2.0, 0.0, 0.0]) / 3)


def test_no_value_counts_as_clipped_that_has_moved_less_than_it_may() -> None:
    """Near 0, v_old + (v - v_old) is not v in float32, and may be the farther one from the return."""
    torch.manual_seed(0)
    old, values, returns = torch.randn(3, 1000) * torch.tensor([[1e-3], [1e-3], [1.0]])
    mask = torch.ones(1000)
    loss = ValueLoss(0.5, "token_mean")
    _, metrics = loss(LossInputs({"values": values}, mask, (1000,), {"values": old, "returns": returns}))
    assert metrics["clip_fraction"].sum == 0


@pytest.mark.parametrize(("aggregation", "want"), [("sequence_mean", 2.5 / 2 + 0.5), ("sequence_sum", 3.0)])
def test_aggregations_are_those_of_the_policy_loss(aggregation: str, want: float) -> None:
    loss, _, _ = run(ValueLoss(None, aggregation))  # type: ignore[arg-type]
    assert float(loss) == pytest.approx(want / 2)
