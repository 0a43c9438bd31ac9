"""Decoder layers of TransformerEngine's modules: `actor.megatron.kernels=te`.

Megatron-Core's own spec provider names the modules: linear layers with the norm before them, attention by cuDNN or
FlashAttention. Experts stay two tensors (`GroupedExperts`), whose products TransformerEngine computes, so that the
parameters of a model have the same shapes with all kernels. Only this module imports TransformerEngine.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

from fivefold.engine.context_parallel import PackedAttention
from fivefold.engine.kernels.flash import FlashPlan
from fivefold.engine.kernels.matmul import main_grad, mark_accumulated
from fivefold.mcore import releases
from fivefold.mcore.layers import GroupedExperts


class TESpecs(TESpecProvider):
    """TransformerEngine's modules, for packed sequences and for experts in two tensors."""

    def core_attention(self) -> type:
        return TECoreAttention

    def grouped_mlp_modules(self, *_: bool) -> Any:
        return releases.experts(TEExperts)


class TECoreAttention(TEDotProductAttention):
    """TransformerEngine's attention in the calling convention of `PackedCoreAttention`."""

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedAttention
    ) -> torch.Tensor:
        """Attend from query [T, heads, d] with key and value [T, kv_heads, d]. Returns [T, heads, d]."""
        plan = packed.plan
        assert isinstance(plan, FlashPlan)  # The checks of kernels=te leave bfloat16 on GPUs.
        lengths = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=plan.cu_queries,
            cu_seqlens_kv=plan.cu_keys,
            max_seqlen_q=plan.max_queries,
            max_seqlen_kv=plan.max_keys,
        )
        output: torch.Tensor = super().forward(
            query, key, value, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=lengths
        )
        return output.view(query.shape)


class TEExperts(GroupedExperts):
    """Experts whose matrix products are TransformerEngine's, which waits for the numbers of rows."""

    def _groups(self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs_N: torch.Tensor) -> list[int]:
        return tokens_per_expert.tolist()

    def multiply(self, rows: torch.Tensor, weight: torch.Tensor, groups: list[int]) -> torch.Tensor:
        product: torch.Tensor = TEGroupedLinear.apply(rows, weight, groups)
        return product


class TEGroupedLinear(torch.autograd.Function):
    """As `fivefold.mcore.layers.GroupedLinear`, with the number of rows of each expert in place of their ends."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        output = x.new_empty(len(x), weight.shape[1])
        _multiply(weight.detach().unbind(), x.split(sizes), [output], sizes, layout="TN", single_output=True)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        rows, grads = x.split(ctx.sizes), grad.split(ctx.sizes)
        grad_x = torch.empty_like(x)
        weights = weight.detach().unbind()
        _multiply(weights, grads, [grad_x], ctx.sizes, layout="NN", grad=True, single_output=True)
        if not weight.requires_grad:
            return grad_x, None, None
        buffer = main_grad(weight)
        total = torch.zeros_like(weight) if buffer is None else buffer
        # Experts without tokens are left as they are.
        _multiply(rows, grads, list(total.unbind()), ctx.sizes, layout="NT", grad=True, accumulate=True)
        return grad_x, total if buffer is None else mark_accumulated(weight), None


def _multiply(
    a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...], out: list[torch.Tensor], sizes: list[int], **options: Any
) -> None:
    if sum(sizes):
        general_grouped_gemm(list(a), list(b), out, [None] * len(a), b[0].dtype, m_splits=sizes, **options)
