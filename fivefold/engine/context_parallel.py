"""What ranks that share sequences exchange: keys and values, or what they are made of, and predictions for the loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fivefold.engine.kernels.varlen import varlen_attention
from fivefold.engine.sequences import PackedAttention


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedAttention,
    cp_group: dist.ProcessGroup,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend from query [T, heads, d] with key [T, kv_heads, d] and value [T, kv_heads, v], all of this rank's tokens.

    The queries see the keys of the whole context-parallel group. `scale` multiplies the scores; None: 1 / sqrt(d).

    Returns:
        [T, heads, v].
    """
    if cp_group.size() > 1:
        widths = (key.shape[-1], value.shape[-1])
        key, value = gathered_keys(torch.cat((key, value), dim=-1), packed, cp_group).split(widths, dim=-1)
    return varlen_attention(query, key, value, packed.plan, scale)


def gathered_keys(local: torch.Tensor, packed: PackedAttention, cp_group: dist.ProcessGroup) -> torch.Tensor:
    """Return the rows [K, ...] that this rank's queries attend to, of the rows [T, ...] of each rank's own tokens."""
    gathered: torch.Tensor = _GatherKeys.apply(local, packed.first_keys_K, packed.second_keys_K, cp_group)
    return gathered


class _GatherKeys(torch.autograd.Function):
    """All-gather over the context-parallel group, then take the rows that the two local chunks attend to.

    A row may serve both chunks, but each chunk has it only once. The backward pass therefore adds two plain index
    writes: it needs no atomics and gives the same bits every time.
    """

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, first_rows: torch.Tensor, second_rows: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(first_rows, second_rows)
        ctx.group, ctx.local_shape = group, local.shape
        gathered = local.new_empty(local.shape[0] * group.size(), *local.shape[1:])
        dist.all_gather_into_tensor(gathered, local.contiguous(), group=group)
        return torch.cat((gathered[first_rows], gathered[second_rows]))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        first_rows, second_rows = ctx.saved_tensors
        first, second = grad.split((first_rows.numel(), second_rows.numel()))
        gathered = grad.new_zeros(ctx.local_shape[0] * ctx.group.size(), *ctx.local_shape[1:])
        gathered[second_rows] = second
        gathered[first_rows] += first
        local = grad.new_empty(ctx.local_shape)
        dist.reduce_scatter_tensor(local, gathered, group=ctx.group)
        return local, None, None, None


class SumOverGroup(torch.autograd.Function):
    """All-reduce whose result enters the same loss on every rank, so that each addend has the gradient of the sum."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
