"""Dropless all-to-all token dispatch on stock PyTorch: sort by expert, exchange, sort again, and the same way back.

    tokens [T, H] ─ sorted by expert ─> [T * k, H] ─ all-to-all over expert ranks ─> sorted by local expert ─> experts
    tokens [T, H] <─ sum of k rows ──── [T * k, H] <─ all-to-all back ───────────── order of arrival <──────── experts

Both sorts are row gathers whose backward passes are row gathers too: no atomics, the same bits every time. With one
expert-parallel rank, the device never waits for the host.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import all_to_all, gather_from_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from fivefold.config.schema.megatron import MegatronConfig
from fivefold.engine.kernels import sum_rows


def check_deepep(config: MegatronConfig) -> None:
    """Refuse DeepEP's dispatcher where it is not installed.

    Raises:
        ValueError: `token_dispatcher` is `flex`, and there is no package `deep_ep`.
    """
    if config.token_dispatcher == "flex" and find_spec("deep_ep") is None:
        raise ValueError(
            "token_dispatcher=flex exchanges tokens by DeepEP, and the package deep_ep is not installed here: build it "
            "(https://github.com/deepseek-ai/DeepEP), or set token_dispatcher to alltoall"
        )


def install(decoder: nn.Module, config: TransformerConfig) -> None:
    """Give every MoE layer a `SortingDispatcher`. Tensor-parallel experts keep Megatron-Core's own dispatcher."""
    if config.moe_token_dispatcher_type != "alltoall" or config.expert_tensor_parallel_size > 1:
        return
    for module in decoder.modules():
        if isinstance(module, MoELayer):
            module.token_dispatcher = SortingDispatcher(module.num_local_experts, config, module.ep_group)


class SortingDispatcher(MoETokenDispatcher):
    """The steps of Megatron-Core's MoE layer, in the order of its calls. Attributes hold a forward pass's state."""

    def __init__(self, n_local_experts: int, config: TransformerConfig, ep_group: dist.ProcessGroup) -> None:
        self.config = config
        self.group = ep_group
        self.n_local_experts = n_local_experts
        self.shared_experts = None

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy each token once for each of its k experts, sorted by expert.

        Returns:
            Rows [T * k, H], and their router probabilities [T * k].
        """
        self.shape = hidden_states.shape
        top_k = self.config.moe_router_topk
        # Every token has exactly k experts, so this order is known without asking the device how many there are.
        expert_TK = routing_map.to(torch.uint8).topk(top_k, dim=1).indices
        order_N = expert_TK.flatten().argsort(stable=True)
        self.row_TK = invert(order_N).view(-1, top_k)
        self.token_N = order_N // top_k
        self.counts_E = routing_map.sum(0)
        rows = _CopyRows.apply(hidden_states.view(-1, self.shape[-1]), self.token_N, self.row_TK)
        return rows, probs.gather(1, expert_TK).flatten()[order_N]

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send each row and its probability to the rank that has its expert; return those that this rank receives."""
        if self.group.size() == 1:
            return hidden_states, probs
        # [sender, expert]: how many rows each rank has for each expert.
        counts = gather_from_sequence_parallel_region(self.counts_E, group=self.group).view(self.group.size(), -1)
        first = self.group.rank() * self.n_local_experts
        self.received = counts[:, first : first + self.n_local_experts].contiguous()
        sent = self.counts_E.view(self.group.size(), self.n_local_experts).sum(1)
        self.sent_splits, self.received_splits = torch.stack((sent, self.received.sum(1))).tolist()
        return (
            all_to_all(self.group, hidden_states, self.received_splits, self.sent_splits),
            all_to_all(self.group, probs, self.received_splits, self.sent_splits),
        )

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sort the received rows by local expert. Returns rows, number of rows of each expert, and probabilities."""
        if self.group.size() == 1:
            return hidden_states, self.counts_E, probs
        expert_of_run = torch.arange(self.n_local_experts, device=hidden_states.device).repeat(self.group.size())
        expert_N = expert_of_run.repeat_interleave(self.received.flatten(), output_size=hidden_states.shape[0])
        self.order_N = expert_N.argsort(stable=True)
        self.inverse_N = invert(self.order_N)
        hidden_states = _ReorderRows.apply(hidden_states, self.order_N, self.inverse_N)
        return hidden_states, self.received.sum(0), probs[self.order_N]

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sort the rows back into the order in which they arrived."""
        if self.group.size() == 1:
            return hidden_states
        return _ReorderRows.apply(hidden_states, self.inverse_N, self.order_N)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Send each row back to the rank of its token."""
        if self.group.size() == 1:
            return hidden_states
        return all_to_all(self.group, hidden_states, self.sent_splits, self.received_splits)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sum each token's k rows (already weighted by the experts), in the input's shape."""
        tokens: torch.Tensor = _SumRows.apply(hidden_states, self.row_TK, self.token_N).view(self.shape)
        # What stays until the next pass keeps the blocks of CUDA's allocator that it lies in: gigabytes for megabytes.
        del self.row_TK, self.token_N, self.counts_E
        if self.group.size() > 1:
            del self.received, self.order_N, self.inverse_N
        return tokens


def invert(order_N: torch.Tensor) -> torch.Tensor:
    """Return the permutation int64 [N] that undoes the permutation `order_N`."""
    inverse = torch.empty_like(order_N)
    inverse[order_N] = torch.arange(order_N.numel(), device=order_N.device)
    return inverse


class _CopyRows(torch.autograd.Function):
    """rows[n] = tokens[token_N[n]]. row_TK holds the rows of each token's k copies."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, token_N: torch.Tensor, row_TK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(row_TK)
        return tokens.index_select(0, token_N)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (row_TK,) = ctx.saved_tensors
        return sum_rows(grad.contiguous(), row_TK), None, None


class _SumRows(torch.autograd.Function):
    """tokens[t] = sum over k of rows[row_TK[t, k]]: the transpose of `_CopyRows`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, row_TK: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token_N)
        return sum_rows(rows, row_TK)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (token_N,) = ctx.saved_tensors
        return grad.contiguous().index_select(0, token_N), None, None


class _ReorderRows(torch.autograd.Function):
    """rows[order], whose gradient is grad[inverse]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order_N: torch.Tensor, inverse_N: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse_N)
        return rows.index_select(0, order_N)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return grad.contiguous().index_select(0, inverse_N), None, None
