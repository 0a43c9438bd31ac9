"""The experts of one rank as two contiguous tensors, multiplied by grouped matmuls."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.utils import divide
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from fivefold.engine.kernels.elementwise import swiglu
from fivefold.engine.kernels.matmul import add_grouped_product, grouped_mm, main_grad, mark_accumulated


class GroupedExperts(MegatronModule):
    """SwiGLU experts, down(silu(gate(x)) * up(x) * probability), for tokens sorted by expert.

    weight1 [experts, 2 * ffn / etp, hidden] holds gate above up, weight2 [experts, hidden, ffn / etp] holds down: the
    orientation of Hugging Face's files, so that loading and exporting only slice.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection: Any, **_unused: Any) -> None:
        super().__init__(config=config)
        width = divide(config.moe_ffn_hidden_size, pg_collection.expt_tp.size())
        self.weight1 = self._parameter(num_local_experts, 2 * width, config.hidden_size, partition_dim=1)
        self.recomputes_activation = (
            config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        )
        self.weight2 = self._parameter(num_local_experts, config.hidden_size, width, partition_dim=2)

    def _parameter(self, *shape: int, partition_dim: int) -> nn.Parameter:
        weight = nn.Parameter(torch.empty(*shape, dtype=self.config.params_dtype, device=torch.cuda.current_device()))
        # Every rank holds other experts or another shard of them, so each counts in the gradient norm.
        set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=partition_dim, stride=1)
        weight.allreduce = False  # type: ignore[attr-defined]  # reduced over the expert data-parallel group, not over the dense one
        return weight

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Apply each token's expert.

        Args:
            permuted_local_hidden_states: [N, hidden], sorted by expert.
            tokens_per_expert: int64 [experts].
            permuted_probs: [N], the router's probabilities.

        Returns:
            [N, hidden], a partial sum if etp > 1; and None, because there is no bias.
        """
        tokens = permuted_local_hidden_states
        groups = self._groups(tokens, tokens_per_expert)
        gate_up = self._multiply(tokens, self.weight1, groups)
        if not (self.recomputes_activation and torch.is_grad_enabled()):
            return self._multiply(swiglu(gate_up, permuted_probs), self.weight2, groups), None
        activation = CheckpointWithoutOutput()
        output = self._multiply(activation.checkpoint(swiglu, gate_up, permuted_probs), self.weight2, groups)
        activation.discard_output_and_register_recompute(output)
        return output, None

    def _groups(self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor) -> Any:
        """Return which rows are of which expert, as `_multiply` takes it."""
        return tokens_per_expert.to(tokens.device, torch.int32, non_blocking=True).cumsum(0, dtype=torch.int32)

    def _multiply(self, rows: torch.Tensor, weight: torch.Tensor, groups: Any) -> torch.Tensor:
        """Return rows [N, I] times the transposes of weight [experts, O, I], each row times its expert's: [N, O]."""
        product: torch.Tensor = GroupedLinear.apply(rows, weight, groups)
        return product


class GroupedLinear(torch.autograd.Function):
    """Rows ends[e-1] .. ends[e] of x [N, I] times the transpose of weight[e], weight [E, O, I]. Returns [N, O].

    The weight's gradient is added to its `main_grad` within the product where Megatron's DDP keeps one.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, ends)
        return grouped_mm(x, weight.transpose(1, 2), ends)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, ends = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = grouped_mm(grad, weight, ends)
        buffer = main_grad(weight)
        if buffer is None:
            return grad_x, grouped_mm(grad.t(), x, ends), None
        add_grouped_product(buffer, grad, x, ends)
        return grad_x, mark_accumulated(weight), None
