"""Metrics of a part of a step, which merge over micro-batches, ranks and updates into one number.

loss, engine ──Metric: sum, weight, reduce──> micro-batches ─> ranks ─> updates ──Metric.value──> metrics.jsonl
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Number = torch.Tensor | float
"""A scalar: a tensor on the device of the loss, a float everywhere else."""

Reduction = Literal["mean", "share", "ess", "sum", "max", "min", "last"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of a part of a step. It has no value where its weight is 0.

    mean     sum / weight
    share    sum / weight, without a value where the sum is 0
    ess      sum^2 / (weight * square): Kish's effective sample size of `weight` numbers, as a share of them
    sum      sum
    max      the largest sum of any part, with `min` and `last` alike
    """

    sum: Number
    weight: Number = 1.0
    """Tokens, or parts, that a mean is over."""
    reduce: Reduction = "mean"
    square: Number = 0.0
    """Sum of the squares, for `ess`."""

    def __add__(self, other: Metric) -> Metric:
        """Return the metric of both parts."""
        match self.reduce:
            case "max" | "min" as extreme:
                total = {"max": max, "min": min}[extreme](self.sum, other.sum)
            case "last":
                total = other.sum
            case _:
                total = self.sum + other.sum
        return Metric(total, self.weight + other.weight, self.reduce, self.square + other.square)

    @property
    def value(self) -> float | None:
        """The number that the user sees; None if there is none."""
        total, weight = float(self.sum), float(self.weight)
        if weight == 0:
            return None
        match self.reduce:
            case "mean":
                return total / weight
            case "share":
                return total / weight or None
            case "ess":
                return effective_share(total / weight, float(self.square) / weight)
            case _:
                return total


Metrics = dict[str, Metric]
"""Metrics by name."""


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Return the metrics of all parts together, which need not have the same names."""
    total: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            total[name] = total[name] + metric if name in total else metric
    return total


def metric_values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the numbers of all metrics that have one."""
    return {name: value for name, metric in metrics.items() if (value := metric.value) is not None}


def effective_share(mean: float, mean_square: float) -> float:
    """Return Kish's effective sample size, (sum w)^2 / sum w^2, as a share of the number of weights w."""
    return mean * mean / mean_square if mean_square > 0 else 0.0
