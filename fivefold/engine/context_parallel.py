"""Sequences that several ranks share: how they are split, and what the ranks exchange.

    padded        aaaaaaa. bbb.           each sequence to a multiple of 2 * cp
    rank 0 of 2   aa b .. | a. ..         zig-zag: the first chunk of every sequence, then the last
    rank 1 of 2   aa b .. | aa b          the second, then the last but one

In this order, causal attention costs the same on every rank. Each rank's queries see the keys of the whole group.
Gated delta nets need whole sequences: ranks exchange tokens for heads before them, and back after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from fivefold.config.schema.engine import FlashAttention
from fivefold.engine.kernels.varlen import AttentionPlan, plan_attention


@dataclass(frozen=True)
class PackedAttention:
    """The packing as attention needs it: which queries see which keys."""

    plan: AttentionPlan
    first_keys_K: torch.Tensor | None = None
    """int64 [K1], with context parallelism: the rows, among the keys gathered rank after rank, that the first chunks
    attend to."""
    second_keys_K: torch.Tensor | None = None
    """int64 [K2]: the same for the second chunks."""
    spans: tuple[int, ...] = ()
    """Tokens of each packed sequence, padding included; with context parallelism, of the whole sequences."""


def zigzag(spans: Sequence[int], cp_rank: int, cp_size: int) -> torch.Tensor:
    """Return the padded places of one rank's tokens, in the rank's order: all first chunks, then all second ones."""
    pieces = []
    for chunk_index in (cp_rank, 2 * cp_size - 1 - cp_rank):
        start = 0
        for span in spans:
            chunk = span // (2 * cp_size)
            pieces.append(torch.arange(start + chunk_index * chunk, start + (chunk_index + 1) * chunk))
            start += span
    return torch.cat(pieces)


def zigzag_attention(
    spans: Sequence[int], cp_rank: int, cp_size: int, flash: FlashAttention | None, device: torch.device
) -> PackedAttention:
    """Return the attention of one rank's chunks to the keys that are gathered rank after rank."""
    row_of_place = _rows_of_places(spans, cp_size)
    keys, entries = [], []
    for chunk_index in (cp_rank, 2 * cp_size - 1 - cp_rank):
        prefixes, start = [], 0
        for span in spans:
            chunk = span // (2 * cp_size)
            prefix = (chunk_index + 1) * chunk
            prefixes.append(row_of_place[start : start + prefix])
            entries.append((chunk, prefix))
            start += span
        keys.append(torch.cat(prefixes).to(device, non_blocking=True))
    plan = plan_attention(entries, flash=flash, device=device)
    return PackedAttention(plan, first_keys_K=keys[0], second_keys_K=keys[1], spans=tuple(spans))


def _rows_of_places(spans: Sequence[int], cp_size: int) -> torch.Tensor:
    """Return the row of each padded place among the tokens of all ranks, rank after rank."""
    gathered = torch.cat([zigzag(spans, rank, cp_size) for rank in range(cp_size)])
    row_of_place = torch.empty_like(gathered)
    row_of_place[gathered] = torch.arange(gathered.numel())
    return row_of_place


@lru_cache(maxsize=64)
def _exchange_order(spans: tuple[int, ...], cp_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the row of each place, and the place of each row, as `_rows_of_places` has them."""
    rows = _rows_of_places(spans, cp_size)
    return rows.to(device), rows.argsort().to(device)


def heads_of_all_tokens(local_TC: torch.Tensor, spans: tuple[int, ...], cp_group: dist.ProcessGroup) -> torch.Tensor:
    """Return the rank's share of the heads, for whole sequences: [cp * T, C / cp], of all heads of its tokens.

    The channels are the heads', one head after the other. `spans` are the tokens of the whole sequences.
    """
    by_rank = local_TC.unflatten(1, (cp_group.size(), -1)).transpose(0, 1)
    rows, _ = _exchange_order(spans, cp_group.size(), local_TC.device)
    exchanged: torch.Tensor = _Exchange.apply(by_rank, cp_group)
    return exchanged.flatten(0, 1)[rows]


def tokens_of_all_heads(share_SC: torch.Tensor, spans: tuple[int, ...], cp_group: dist.ProcessGroup) -> torch.Tensor:
    """Return all heads of the rank's tokens, [T, C], of its share of the heads of whole sequences, [cp * T, C / cp]."""
    _, places = _exchange_order(spans, cp_group.size(), share_SC.device)
    by_rank = share_SC[places].unflatten(0, (cp_group.size(), -1))
    exchanged: torch.Tensor = _Exchange.apply(by_rank, cp_group)
    return exchanged.transpose(0, 1).flatten(1)


class _Exchange(torch.autograd.Function):
    """All-to-all of [group, ...]: part r goes to rank r of the group. Gradients travel back the same way."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchanged(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


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


class _CopyToGroup(torch.autograd.Function):
    """Identity whose gradient is summed over the group."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def copy_to_group(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `tensor`, which all ranks of the group have and each uses in its own part of a sum."""
    return _CopyToGroup.apply(tensor, group) if group.size() > 1 else tensor


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
