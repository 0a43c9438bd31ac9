"""The losses of `fivefold sft`, `dpo` and `rm`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fivefold.algorithms.loss import LossInputs
from fivefold.algorithms.metrics import Metrics
from fivefold.algorithms.token_sums import means, zero_unless
from fivefold.batch import Totals

COEFFICIENT = "coefficient"
"""Name of the field with the coefficient of each token's sequence."""


@dataclass(frozen=True)
class SFTLoss:
    """Negative log-likelihood of the trained tokens, averaged over the tokens of the mini-batch."""

    temperature: float = 1.0
    entropy_gradient: bool = False
    divergence: None = None
    before: None = None

    def normalizer(self, totals: Totals) -> float:
        return float(max(1, totals.n_trained_tokens))

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        trained_T = inputs.mask_T.bool()
        nll = -zero_unless(trained_T, inputs.predictions["logprobs"]).sum()
        entropy = zero_unless(trained_T, inputs.predictions["entropy"].detach()).sum()
        return nll, means({"nll": nll.detach(), "entropy": entropy}, trained_T)


@dataclass(frozen=True)
class LinearLoss:
    """The sum over trained tokens of coefficient * prediction.

    With the derivatives of another loss as coefficients (`fivefold/algorithms/preferences.py`), it has that loss's
    gradient, but not its value. The coefficients belong to a mean already, so nothing divides the sum.

    Fields read: `coefficient`.
    """

    prediction: Literal["logprobs", "values"]
    """The prediction of the model's head that is summed."""
    temperature: float = 1.0
    entropy_gradient: bool = False
    divergence: None = None
    before: None = None

    def normalizer(self, totals: Totals) -> float:
        return 1.0

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, Metrics]:
        trained_T = inputs.mask_T.bool()
        predicted_T = zero_unless(trained_T, inputs.predictions[self.prediction])
        coefficient_T = zero_unless(trained_T, inputs.fields[COEFFICIENT])
        sums = {}
        if "entropy" in inputs.predictions:
            sums["entropy"] = zero_unless(trained_T, inputs.predictions["entropy"].detach()).sum()
        return (coefficient_T * predicted_T).sum(), means(sums, trained_T)
