"""The loss of a critic: the squared distance of its values from the returns, clipped as in PPO."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fivefold.algorithms.loss import Aggregation, LossInputs
from fivefold.algorithms.metrics import Metrics
from fivefold.algorithms.token_sums import divisor, means, token_weights
from fivefold.batch import Totals


@dataclass(frozen=True)
class ValueLoss:
    """Squared error of the values, which may move only `clip` away from those that the advantages came from.

    With value v, value v_old at the beginning of the step, return R and clip range c, a token costs

        cost = 1/2 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)

    as in OpenAI's baselines of PPO and in verl. The costs are aggregated as in `PolicyLoss`.

    Fields read: `returns`, and `values` for v_old.
    """

    clip: float | None
    """Largest distance of a value from v_old that still has a gradient; None: there is no such limit."""
    aggregation: Aggregation

    temperature: float = 1.0
    """Not used: values have no temperature."""
    entropy_gradient: bool = False
    divergence: None = None
    before: None = None

    def normalizer(self, totals: Totals) -> float:
        return divisor(totals, self.aggregation)

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        trained_T = inputs.mask_T.bool()
        values_T, returns_T, old_T = (
            torch.where(trained_T, tensor_T, torch.zeros_like(tensor_T))
            for tensor_T in (inputs.predictions["values"], inputs.fields["returns"], inputs.fields["values"])
        )
        error_T = (values_T - returns_T).square()
        cost_T, is_clipped_T = error_T, torch.zeros_like(trained_T)
        if self.clip is not None:
            # Values inside stay as they are to the bit, so that no rounding error counts as clipped.
            clipped_T = values_T.clamp(old_T - self.clip, old_T + self.clip)
            clipped_error_T = (clipped_T - returns_T).square()
            cost_T, is_clipped_T = torch.maximum(error_T, clipped_error_T), clipped_error_T > error_T
        cost_T = 0.5 * cost_T
        sums = {"value_loss": cost_T.detach().sum(), "clip_fraction": is_clipped_T.to(cost_T.dtype).sum()}
        weights_T = token_weights(inputs.mask_T, inputs.lengths, self.aggregation)
        return (cost_T * weights_T).sum(), means(sums, trained_T)
