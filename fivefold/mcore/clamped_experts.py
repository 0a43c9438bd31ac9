"""GPT-OSS's experts, which have biases: down((up + 1) * gate * sigmoid(1.702 gate)), with gate and up clamped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fivefold.engine.kernels.elementwise import clamped_swiglu
from fivefold.engine.kernels.matmul import add_grouped_product, grouped_mm, main_grad, mark_accumulated
from fivefold.mcore.layers import GroupedExperts


@dataclass(frozen=True)
class _Groups:
    """The rows of each expert, and how much of its biases each row gets."""

    ends_E: torch.Tensor
    """int32: the end of each expert's rows."""
    shares_NE: dict[str, torch.Tensor]
    """The part of each expert's bias that is added to each row, by the weight: 1 or the row's probability where the row
    is the expert's, else 0. Products with it have one order of summation in the backward pass."""


class ClampedExperts(GroupedExperts):
    """Such experts for tokens sorted by expert.

    weight1 [experts, hidden, 2 * ffn / etp], whose columns are gate and up by turns, and weight2
    [experts, ffn / etp, hidden] have the orientation of Hugging Face's files. The biases are [experts, 2 * ffn / etp]
    and [experts, hidden].
    """

    is_transposed = True

    def _make_parameters(self, n_experts: int, width: int) -> None:
        hidden = self.config.hidden_size
        self.weight1 = self._parameter(n_experts, hidden, 2 * width, partition_dim=2)
        self.fc1 = _Biases(self._parameter(n_experts, 2 * width, partition_dim=1))
        self.weight2 = self._parameter(n_experts, width, hidden, partition_dim=1)
        self.fc2 = _Biases(self._parameter(n_experts, hidden, partition_dim=1))
        # All ranks that share an expert have it whole; the norm counts it on the first of them.
        vars(self.fc2.bias)["shared"] = self.etp_group.rank() > 0
        self.limit = float(self.config.activation_func_clamp_value)

    def activation(self, gate_up: torch.Tensor, probs_N: torch.Tensor) -> torch.Tensor:
        return clamped_swiglu(gate_up, probs_N, self.limit)

    def _groups(self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs_N: torch.Tensor) -> _Groups:
        ends_E = super()._groups(tokens, tokens_per_expert, probs_N)
        expert_N = torch.searchsorted(ends_E, torch.arange(len(tokens), device=tokens.device), right=True)
        own_NE = nn.functional.one_hot(expert_N, len(ends_E)).to(tokens.dtype)
        return _Groups(ends_E, {"weight1": own_NE, "weight2": own_NE * probs_N.unsqueeze(1).to(tokens.dtype)})

    def _product(self, rows: torch.Tensor, kind: str, groups: _Groups) -> torch.Tensor:
        bias_EO: torch.Tensor = self.fc1.bias if kind == "weight1" else self.fc2.bias
        if kind == "weight2" and self.etp_group.rank() > 0:
            # The products are parts of a sum, to which the first rank adds it; each rank computes its whole gradient.
            bias_EO = bias_EO - bias_EO.detach()
        return super()._product(rows, kind, groups) + groups.shares_NE[kind] @ bias_EO

    def multiply(self, rows: torch.Tensor, weight: torch.Tensor, groups: _Groups) -> torch.Tensor:
        """Return rows [N, I] times weight [experts, I, O], each row times its expert's: [N, O]."""
        product: torch.Tensor = GroupedInputs.apply(rows, weight, groups.ends_E)
        return product


class GroupedInputs(torch.autograd.Function):
    """As `fivefold.mcore.layers.GroupedLinear`, with weights [E, I, O]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, ends)
        return grouped_mm(x, weight, ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grouped_mm(grad, weight.transpose(1, 2), ends)
        if not weight.requires_grad:
            return grad_x, None, None
        buffer = main_grad(weight)
        if buffer is None:
            return grad_x, grouped_mm(x.t(), grad, ends), None
        add_grouped_product(buffer, x, grad, ends)
        return grad_x, mark_accumulated(weight), None


class _Biases(nn.Module):
    """A module whose only parameter is called `bias`, by which Megatron-Core knows what is not decayed."""

    def __init__(self, bias: nn.Parameter) -> None:
        super().__init__()
        self.bias = bias
