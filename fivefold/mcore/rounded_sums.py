"""Gradients that are summed in bfloat16 over micro-batches, each addition rounded stochastically."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fivefold.bridge.parameters import Parameter
from fivefold.engine.kernels.rounding import GradientRounding, add_rounded
from fivefold.layout.grid import RankPosition


def round_gradients(parameters: Iterable[Parameter], position: RankPosition) -> list[GradientRounding]:
    """Let additions to each bfloat16 sum of a gradient be rounded stochastically.

    Args:
        parameters: those that have a sum in Megatron's DDP, their `main_grad`.
        position: of this rank.

    Returns:
        What draws the seeds of each sum, for `GradientRounding.start` at each optimizer step.
    """
    roundings = []
    for each in parameters:
        if vars(each.tensor)["main_grad"].dtype == torch.bfloat16:
            replica = f"{position.edp}" if each.mapping.domain == "expert" else f"{position.dp}/{position.cp}"
            roundings.append(GradientRounding(f"{each.name}/{replica}"))
            _round_sum(each.tensor, roundings[-1])
    return roundings


def _round_sum(tensor: torch.Tensor, rounding: GradientRounding) -> None:
    """Round additions to one sum.

    A product adds itself to the sum, and says so. Gradients of other operations are added here, just before Megatron's
    DDP would add them, which gets zeros in their place.
    """
    total = vars(tensor)["main_grad"]
    total.rounding = rounding

    def add(gradient: torch.Tensor) -> torch.Tensor:
        if vars(tensor)["grad_added_to_main_grad"] and not vars(tensor).get("zero_out_wgrad", False):
            return gradient
        add_rounded(total, gradient, rounding.next_seed())
        return torch.zeros_like(gradient)

    tensor.register_hook(add)
