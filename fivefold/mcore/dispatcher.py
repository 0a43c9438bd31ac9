"""Dropless token dispatch on stock PyTorch: gather, sort by expert, exchange, sort again, and the same way back.

    tokens [T, H] ─ gathered over expert-tensor ranks ─> [G, H] ─ sorted by expert ─> [G * k, H]
                                  ─ all-to-all over expert ranks ─> sorted by local expert ─> experts

    tokens [T, H] <─ reduce-scatter over expert-tensor ranks ─ [G, H] <─ sum of k rows ─ [G * k, H]
                                  <─ all-to-all back ─────────────── order of arrival <────── experts

G = T * etp: ranks that hold slices of the same experts need all of each other's tokens. They exchange each token once,
before it is copied for its k experts, and sum what their slices make of it after its k rows are one again.

Both sorts are row gathers whose backward passes are row gathers too: no atomics, the same bits every time. With one
expert-parallel rank, the device never waits for the host; with several, the host learns how many rows travel while the
device sorts them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import all_to_all, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.mappings import reduce_scatter_to_sequence_parallel_region
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from fivefold.engine.kernels.elementwise import sum_rows


class SortingDispatcher(MoETokenDispatcher):
    """The steps of Megatron-Core's MoE layer, in the order of its calls. Attributes hold a forward pass's state.

    With `moe_shared_expert_overlap`, the dispatcher computes the shared experts: Megatron-Core puts them on a separate
    stream, where they run while tokens travel, the first half on the way there, the second on the way
    back.
    """

    def __init__(self, n_local_experts: int, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(config, groups)
        self.n_local_experts = n_local_experts
        # Where one of the two groups is everything, their product would be another communicator of the same ranks.
        if self.tp_size == 1:
            self.counting_group = self.ep_group
        else:
            self.counting_group = self.tp_group if self.ep_size == 1 else self.tp_ep_group

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy each token of the expert-tensor ranks once for each of its k experts, sorted by expert.

        Returns:
            Rows [G * k, H], and their router probabilities [G * k].
        """
        self.shape = hidden_states.shape
        self._count(routing_map)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        top_k = self.config.moe_router_topk
        # Every token has exactly k experts, so this order is known without asking the device how many there are.
        expert_TK = routing_map.to(torch.uint8).topk(top_k, dim=1).indices
        prob_GK = self._gather(probs.gather(1, expert_TK))
        order_N = self._gather(expert_TK.int()).flatten().argsort(stable=True)
        self.row_GK = invert(order_N).view(-1, top_k)
        self.token_N = order_N // top_k
        token_GH = self._gather(hidden_states.view(-1, self.shape[-1]))
        return _CopyRows.apply(token_GH, self.token_N, self.row_GK), prob_GK.flatten()[order_N]

    def _count(self, routing_map: torch.Tensor) -> None:
        """Find how many rows each expert-parallel rank has for each expert, and send the numbers to the host."""
        counts = gather_from_sequence_parallel_region(routing_map.sum(0), group=self.counting_group)
        # Expert-tensor ranks are side by side, and each of them has the rows of all.
        counts_SE = counts.view(self.ep_size, self.tp_size, -1).sum(1)
        first = self.ep_group.rank() * self.n_local_experts
        self.received_SE = counts_SE[:, first : first + self.n_local_experts].contiguous()
        if self.ep_size > 1:
            sent = counts_SE[self.ep_group.rank()].view(self.ep_size, self.n_local_experts).sum(1)
            self.splits = _HostCopy(torch.stack((sent, self.received_SE.sum(1))))

    def _gather(self, local: torch.Tensor) -> torch.Tensor:
        """Return the rows of all expert-tensor ranks. Each of them uses all rows, so their gradients are summed."""
        if self.tp_size == 1:
            return local
        return gather_from_sequence_parallel_region(local, group=self.tp_group)

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send each row and its probability to the rank that has its expert; return those that this rank receives."""
        if self.ep_size == 1:
            return hidden_states, probs
        self.sent, self.received = self.splits.tolist()
        return (
            all_to_all(self.ep_group, hidden_states, self.received, self.sent),
            all_to_all(self.ep_group, probs, self.received, self.sent),
        )

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sort the received rows by local expert. Returns rows, number of rows of each expert, and probabilities."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(hidden_states)
        if self.ep_size == 1:
            return hidden_states, self.received_SE[0], probs
        expert_of_run = torch.arange(self.n_local_experts, device=hidden_states.device).repeat(self.ep_size)
        expert_N = expert_of_run.repeat_interleave(self.received_SE.flatten(), output_size=hidden_states.shape[0])
        self.order_N = expert_N.argsort(stable=True)
        self.inverse_N = invert(self.order_N)
        hidden_states = _ReorderRows.apply(hidden_states, self.order_N, self.inverse_N)
        return hidden_states, self.received_SE.sum(0), probs[self.order_N]

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sort the rows back into the order in which they arrived."""
        if self.ep_size == 1:
            return hidden_states
        return _ReorderRows.apply(hidden_states, self.inverse_N, self.order_N)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Send each row back to the rank that sorted it."""
        if self.ep_size == 1:
            return hidden_states
        return all_to_all(self.ep_group, hidden_states, self.sent, self.received)

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sum each token's k rows (already weighted by the experts) over all slices, in the input's shape."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(hidden_states)
            self.shared_experts.post_forward_comm()
        tokens: torch.Tensor = _SumRows.apply(hidden_states, self.row_GK, self.token_N)
        if self.tp_size > 1:
            tokens = reduce_scatter_to_sequence_parallel_region(tokens, group=self.tp_group)
        tokens = tokens.view(self.shape)
        # What stays until the next pass keeps the blocks of CUDA's allocator that it lies in: gigabytes for megabytes.
        del self.row_GK, self.token_N, self.received_SE
        if self.ep_size > 1:
            del self.splits, self.order_N, self.inverse_N
        return tokens if self.shared_experts is None else tokens + self.shared_experts.get_output()


class _HostCopy:
    """The values of a small tensor on their way to the host, while the device works on what was queued after them."""

    def __init__(self, values: torch.Tensor) -> None:
        self._host = values
        self._copied: torch.cuda.Event | None = None
        if values.is_cuda:
            stream = _copy_stream(values.device)
            stream.wait_stream(torch.cuda.current_stream())
            self._host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            with torch.cuda.stream(stream):
                self._host.copy_(values, non_blocking=True)
                self._copied = stream.record_event()
            values.record_stream(stream)

    def tolist(self) -> list[Any]:
        """Return the values; the host waits until they have arrived, and for nothing else."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def invert(order_N: torch.Tensor) -> torch.Tensor:
    """Return the permutation int64 [N] that undoes the permutation `order_N`."""
    inverse = torch.empty_like(order_N)
    inverse[order_N] = torch.arange(order_N.numel(), device=order_N.device)
    return inverse


class _CopyRows(torch.autograd.Function):
    """rows[n] = tokens[token_N[n]]. row_GK holds the rows of each token's k copies."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, token_N: torch.Tensor, row_GK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(row_GK)
        return tokens.index_select(0, token_N)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (row_GK,) = ctx.saved_tensors
        return sum_rows(grad.contiguous(), row_GK), None, None


class _SumRows(torch.autograd.Function):
    """tokens[t] = sum over k of rows[row_GK[t, k]]: the transpose of `_CopyRows`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, row_GK: torch.Tensor, token_N: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token_N)
        return sum_rows(rows, row_GK)

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
