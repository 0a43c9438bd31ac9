"""The experts of one rank as two contiguous tensors, multiplied by grouped matmuls."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.utils import divide
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


class GroupedExperts(MegatronModule):
    """SwiGLU experts: down(silu(gate(x)) * up(x)) * probability, for tokens sorted by expert.

    weight1 [experts, 2 * ffn / etp, hidden] holds gate above up, weight2 [experts, hidden, ffn / etp] holds down: the
    orientation of Hugging Face's files, so that loading and exporting only slice.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection: Any, **_unused: Any) -> None:
        super().__init__(config=config)
        width = divide(config.moe_ffn_hidden_size, pg_collection.expt_tp.size())
        self.weight1 = self._parameter(num_local_experts, 2 * width, config.hidden_size, partition_dim=1)
        self.weight2 = self._parameter(num_local_experts, config.hidden_size, width, partition_dim=2)

    def _parameter(self, *shape: int, partition_dim: int) -> nn.Parameter:
        device = torch.cuda.current_device()
        weight = nn.Parameter(torch.empty(*shape, dtype=self.config.params_dtype, device=device))
        # Every rank holds other experts or another shard, so that each counts in the gradient norm.
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=partition_dim, stride=1)
        weight.allreduce = False  # reduced over the expert data-parallel group, not over the dense one
        return weight

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Tokens [N, hidden] sorted by expert, int64 [experts] tokens of each, router probabilities [N].

        Returns [N, hidden] (a partial sum where etp > 1), and no bias.
        """
        tokens = permuted_local_hidden_states
        ends = tokens_per_expert.to(tokens.device, torch.int32, non_blocking=True).cumsum(0, dtype=torch.int32)
        hidden = grouped_linear(tokens, self.weight1, ends)
        hidden = swiglu(hidden, permuted_probs)
        return grouped_linear(hidden, self.weight2, ends), None


def grouped_linear(x_NI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """Rows ends[e-1] .. ends[e] of x times the transpose of weight[e]. Returns [N, O]."""
    return F.grouped_mm(x_NI, weight_EOI.transpose(1, 2), offs=ends_E)


def swiglu(gate_up_N2F: torch.Tensor, probs_N: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up * probability (Shazeer 2020). The product with the fp32 probability is rounded once."""
    gate, up = gate_up_N2F.chunk(2, dim=-1)
    return (F.silu(gate) * up * probs_N.unsqueeze(-1)).to(gate_up_N2F.dtype)
