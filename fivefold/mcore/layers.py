"""What a decoder layer is made of, on stock PyTorch kernels: norm, attention on packed sequences, experts, residual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import CheckpointWithoutOutput
from megatron.core.tensor_parallel.layers import RowParallelLinear, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.utils import divide
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from fivefold.engine.context_parallel import PackedAttention
from fivefold.engine.kernels.elementwise import rms_norm, split_heads, swiglu
from fivefold.engine.kernels.matmul import add_grouped_product, grouped_mm, main_grad, mark_accumulated
from fivefold.engine.sequences import packed_attention

if TYPE_CHECKING:
    from fivefold.mcore.vision import Deepstack


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich 2019), whose gradient Megatron-Core sums over sequence-parallel ranks.

    Some models multiply by 1 + weight.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.factor, self.eps)

    @property
    def factor(self) -> torch.Tensor:
        """What x / rms(x) is multiplied by; 1 + weight is float32, as it is in transformers."""
        return 1.0 + self.weight.float() if self.is_zero_centered else self.weight


def add_residual(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
    """Return a residual connection with dropout in Megatron-Core's calling convention; rate 0 launches no kernel."""

    def add(
        output_and_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, rate: float
    ) -> torch.Tensor:
        output, bias = output_and_bias
        if bias is not None:
            output = output + bias
        return residual + (F.dropout(output, rate, training) if rate > 0 else output)

    return add


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Values that Megatron-Core passes to every layer unchanged: the packing, and the rotation of each token."""

    attention: PackedAttention
    cos_T1D: torch.Tensor
    """[T, 1, rotated channels], in the model's dtype: cosines of the rotation at each token's position."""
    sin_T1D: torch.Tensor
    """[T, 1, rotated channels]: sines of the same rotation."""
    local: tuple[torch.Tensor, torch.Tensor] | None = None
    """The same two of layers with a sliding window, where their rotation differs from other layers'."""
    deepstack: Deepstack | None = None
    """What the first layers add to tokens of images; None: there are no images."""

    def rotation(self, *, is_local: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines of a layer."""
        return self.local if is_local and self.local is not None else (self.cos_T1D, self.sin_T1D)


class PackedSelfAttention(SelfAttention):
    """Megatron-Core's self-attention, its projections and q/k norms, on [T, 1, hidden] packed tokens."""

    def __init__(self, config: TransformerConfig, *args: Any, is_local: bool = False, **options: Any) -> None:
        """Build the layer; with `is_local`, it has the rotation of layers with a sliding window."""
        super().__init__(config, *args, **options)
        self.is_local = is_local

    def forward(
        self, hidden_states: torch.Tensor, *, packed_seq_params: PackedSequences, **_unused: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        projected, _ = self.linear_qkv(hidden_states)
        if self.checkpoint_core_attention and torch.is_grad_enabled():
            output = tensor_parallel.checkpoint(partial(self._attend, packed=packed_seq_params), False, projected)
        else:
            output = self._attend(projected, packed=packed_seq_params)
        return self.linear_proj(output)

    def _attend(self, projected: torch.Tensor, *, packed: PackedSequences) -> torch.Tensor:
        """Return the attention [T, 1, heads * D] of joint projections [T, 1, ...], before the output projection."""
        projected, gate = self._without_gate(projected.squeeze(1))
        cos_T1D, sin_T1D = packed.rotation(is_local=self.is_local)
        query, key, value = split_heads(
            self.normalised(projected),
            self.q_layernorm.factor if self.config.qk_layernorm else None,
            self.k_layernorm.factor if self.config.qk_layernorm else None,
            cos_T1D,
            sin_T1D,
            self.num_query_groups_per_partition,
            self.config.layernorm_epsilon,
            self.hidden_size_per_attention_head,
        )
        output = self.core_attention(query, key, value, packed.attention).flatten(1)
        return (output if gate is None else output * torch.sigmoid(gate)).unsqueeze(1)

    def normalised(self, projected_TC: torch.Tensor) -> torch.Tensor:
        """Return the joint projection behind norms over all heads; here there are none."""
        return projected_TC

    def _without_gate(self, projected_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the joint projection without output gates, and these [T, heads * D]. A head's follows its query."""
        if not self.config.attention_output_gate:
            return projected_TC, None
        groups, width = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        heads = projected_TC.view(len(projected_TC), groups, -1, width)
        query, gate = heads[:, :, :-2].unflatten(2, (-1, 2)).unbind(3)
        return torch.cat((query, heads[:, :, -2:]), dim=2).flatten(1), gate.flatten(1)


class PackedCoreAttention(nn.Module):
    """Softmax attention of the local queries over the keys of the whole context-parallel group.

    Args:
        config: Megatron-Core's configuration of the model.
        pg_collection: the groups of this rank.
        softmax_scale: what the products of queries and keys are multiplied by; None: 1 / sqrt(their width).
        window: tokens that each token sees; None: all before it.
        has_sinks: whether each query head has a sink.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        pg_collection: Any,
        softmax_scale: float | None = None,
        window: int | None = None,
        has_sinks: bool = False,
        **_unused: Any,
    ) -> None:
        super().__init__()
        self.cp_group: dist.ProcessGroup = pg_collection.cp
        self.scale = softmax_scale
        self.window = window
        self.softmax_offset: nn.Parameter | None = None
        if has_sinks:
            heads = divide(config.num_attention_heads, pg_collection.tp.size())
            device = torch.cuda.current_device()
            self.softmax_offset = nn.Parameter(torch.empty(heads, dtype=config.params_dtype, device=device))
            # Every rank has other heads, so each counts in the gradient norm.
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedAttention
    ) -> torch.Tensor:
        """Attend from query [T, heads, d] with key and value [T, kv_heads, d], all of this rank's tokens.

        Returns:
            [T, heads, d].
        """
        return packed_attention(
            query, key, value, packed, self.cp_group, self.scale, window=self.window, sinks=self.softmax_offset
        )


class BiasedRowParallelLinear(RowParallelLinear):
    """Megatron-Core's linear layer over inputs that are cut, with a bias where its configuration has none."""

    def __init__(self, *args: Any, bias: bool, **options: Any) -> None:
        super().__init__(*args, bias=True, **options)


class GroupedExperts(MegatronModule):
    """SwiGLU experts, down(silu(gate(x)) * up(x) * probability), for tokens sorted by expert.

    weight1 [experts, 2 * ffn / etp, hidden] holds gate above up, weight2 [experts, hidden, ffn / etp] holds down: the
    orientation of Hugging Face's files, so that loading and exporting only slice.
    """

    is_transposed = False
    """Whether the weights, and what `multiply` takes, are [experts, in, out]."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, pg_collection: Any, **_unused: Any) -> None:
        super().__init__(config=config)
        self.etp_group: dist.ProcessGroup = pg_collection.expt_tp
        self.recomputes_activation = (
            config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        )
        self._make_parameters(num_local_experts, divide(config.moe_ffn_hidden_size, self.etp_group.size()))
        self.additions: dict[str, Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]] = {}
        """What adds to the products with a weight, by its name: (product, rows, groups) -> their sum (adapters.py)."""

    def _make_parameters(self, n_experts: int, width: int) -> None:
        """Make the weights of this rank's experts, or of its `width` columns of each."""
        self.weight1 = self._parameter(n_experts, 2 * width, self.config.hidden_size, partition_dim=1)
        self.weight2 = self._parameter(n_experts, self.config.hidden_size, width, partition_dim=2)

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
            [N, hidden], a partial sum if etp > 1; and None, because no bias is left to be added.
        """
        tokens = permuted_local_hidden_states
        groups = self._groups(tokens, tokens_per_expert, permuted_probs)
        gate_up = self._product(tokens, "weight1", groups)
        if not (self.recomputes_activation and torch.is_grad_enabled()):
            return self._product(self.activation(gate_up, permuted_probs), "weight2", groups), None
        activation = CheckpointWithoutOutput()
        output = self._product(activation.checkpoint(self.activation, gate_up, permuted_probs), "weight2", groups)
        activation.discard_output_and_register_recompute(output)
        return output, None

    def activation(self, gate_up: torch.Tensor, probs_N: torch.Tensor) -> torch.Tensor:
        """Return what the down projection sees, [N, ffn / etp], of gate and up [N, 2 * ffn / etp] and probabilities."""
        return swiglu(gate_up, probs_N)

    def _groups(self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs_N: torch.Tensor) -> Any:
        """Return where each expert's rows are, as `multiply` takes it."""
        return tokens_per_expert.to(tokens.device, torch.int32, non_blocking=True).cumsum(0, dtype=torch.int32)

    def _product(self, rows: torch.Tensor, kind: str, groups: Any) -> torch.Tensor:
        """Return rows [N, I] times one of the two weights, with what adapters add."""
        product = self.multiply(rows, getattr(self, kind), groups)
        return self.additions[kind](product, rows, groups) if kind in self.additions else product

    def multiply(self, rows: torch.Tensor, weight: torch.Tensor, groups: Any) -> torch.Tensor:
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
        if not weight.requires_grad:
            return grad_x, None, None
        buffer = main_grad(weight)
        if buffer is None:
            return grad_x, grouped_mm(grad.t(), x, ends), None
        add_grouped_product(buffer, grad, x, ends)
        return grad_x, mark_accumulated(weight), None
