"""Dropless token dispatch on stock PyTorch: gather, copy to the ranks of its experts, sort by expert, and the way back.

    tokens [T, H] ─ gathered over expert-tensor ranks ─> [G, H] ─ copied for each rank with experts of the token ─>
                       ─ all-to-all over expert ranks ─> [R, H] ─ copied for each local expert, sorted ─> experts [N, H]

    tokens [T, H] <─ reduce-scatter over expert-tensor ranks ─ [G, H] <─ sum of what ranks return ─
                       <─ all-to-all back ────────────── [R, H] <─ sum of a token's rows ─────────────── experts [N, H]

G = T * etp: ranks that hold slices of the same experts need all of each other's tokens. They exchange each token once,
before it is copied for its experts, and sum what their slices make of it after its rows are one again.

A rank sends a token once to each other rank that has some of its k experts, as DeepEP does, and gets their sum: with
two ranks and k = 8, a quarter of the bytes of one row for each expert.

Copies are row gathers whose backward passes are row gathers too: no atomics, the same bits every time. With one
expert-parallel rank, the device never waits for the host; with several, the host learns how many rows travel.
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

    `expert_K` has the k experts of each token that this rank has at the time: of G tokens, then of the R that arrive.

    With `moe_shared_expert_overlap`, the dispatcher computes the shared experts: Megatron-Core puts them on a separate
    stream, where they run while tokens travel, the first half on the way there, the second on the way
    back.
    """

    def __init__(self, n_local_experts: int, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
        super().__init__(config, groups)
        self.n_local_experts = n_local_experts

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather the tokens of the expert-tensor ranks, and begin to count the rows of each expert.

        Returns:
            Tokens [G, H], and the router probabilities of their experts [G, k].
        """
        self.shape = hidden_states.shape
        self._count(routing_map)
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        # Every token has exactly k experts, so this order is known without asking the device how many there are.
        expert_TK = routing_map.to(torch.uint8).topk(self.config.moe_router_topk, dim=1).indices
        self.expert_K = self._gather(expert_TK.int())
        return self._gather(hidden_states.view(-1, self.shape[-1])), self._gather(probs.gather(1, expert_TK))

    def _count(self, routing_map: torch.Tensor) -> None:
        """Find how many rows each local expert gets."""
        counts = routing_map.sum(0)
        if self.tp_size > 1:
            counts = gather_from_sequence_parallel_region(counts, group=self.tp_group).view(self.tp_size, -1).sum(0)
        self.rows_E = counts

    def _gather(self, local: torch.Tensor) -> torch.Tensor:
        """Return the rows of all expert-tensor ranks. Each of them uses all rows, so their gradients are summed."""
        if self.tp_size == 1:
            return local
        return gather_from_sequence_parallel_region(local, group=self.tp_group)

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens as they are: this rank has all experts."""
        return hidden_states, probs

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Copy each token once for each of its local experts, sorted by expert.

        Returns:
            Rows [N, H], the number of rows of each expert, and the probabilities of the rows [N].
        """
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(hidden_states)
        order_N, self.row_RK = self._sorted()
        self.token_N = order_N // self.config.moe_router_topk
        rows = _CopyRows.apply(hidden_states, self.token_N, self.row_RK)
        return rows, self.rows_E, probs.flatten()[order_N]

    def _sorted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the place among all choices of each row, [N], and the row of each choice, [R, k]; -1: it has none."""
        order_N = self.expert_K.flatten().argsort(stable=True)
        return order_N, invert(order_N).view(self.expert_K.shape)

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sum each token's rows, which are already weighted by the experts."""
        tokens: torch.Tensor = _SumRows.apply(hidden_states, self.row_RK, self.token_N)
        # What stays until the next pass keeps the blocks of CUDA's allocator that it lies in: gigabytes for megabytes.
        del self.row_RK, self.token_N, self.rows_E, self.expert_K
        return tokens

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the tokens as they are: they never left."""
        return hidden_states

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sum tokens over all slices of their experts, in the input's shape."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(hidden_states)
            self.shared_experts.post_forward_comm()
        tokens = hidden_states
        if self.tp_size > 1:
            tokens = reduce_scatter_to_sequence_parallel_region(tokens, group=self.tp_group)
        tokens = tokens.view(self.shape)
        return tokens if self.shared_experts is None else tokens + self.shared_experts.get_output()


class ExchangingDispatcher(SortingDispatcher):
    """Sends tokens to the expert-parallel ranks that have their experts, and gets what these make of them."""

    def _count(self, routing_map: torch.Tensor) -> None:
        """Find how many rows each local expert gets, and how many tokens travel; the host gets the latter."""
        wanted_TS = routing_map.view(len(routing_map), self.ep_size, self.n_local_experts).any(-1).to(torch.uint8)
        self.wanted_SG = self._gather(wanted_TS).T
        # Where one of the two groups is everything, their product would be another communicator of the same ranks.
        group = self.ep_group if self.tp_size == 1 else self.tp_ep_group
        own = torch.cat((wanted_TS.sum(0), routing_map.sum(0)))
        # Expert-tensor ranks are side by side, and each of them has the rows of all.
        counts = gather_from_sequence_parallel_region(own, group=group).view(self.ep_size, self.tp_size, -1).sum(1)
        travelling_SS, rows_SE = counts.split((self.ep_size, counts.shape[1] - self.ep_size), dim=1)
        rank = self.ep_group.rank()
        self.rows_E = rows_SE.sum(0).view(self.ep_size, -1)[rank]
        self.numbers = _HostCopy(torch.cat((travelling_SS[rank], travelling_SS[:, rank], self.rows_E.sum()[None])))

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Send each token, and the probabilities of its experts, to the ranks that have them; return what arrives."""
        order = self.wanted_SG.flatten().argsort(stable=True, descending=True)
        self.sent_GS = invert(order).view(self.wanted_SG.shape).where(self.wanted_SG.bool(), -1).T.contiguous()
        if self.ep_size > self.config.moe_router_topk:
            # A token travels to no more ranks than it has experts.
            self.sent_GS = self.sent_GS.topk(self.config.moe_router_topk, dim=1).values
        *travelling, self.n_rows = self.numbers.tolist()
        self.n_sent, self.n_received = travelling[: self.ep_size], travelling[self.ep_size :]
        self.token_M = order[: sum(self.n_sent)] % len(hidden_states)
        tokens, probs = (_CopyRows.apply(each, self.token_M, self.sent_GS) for each in (hidden_states, probs))
        self.expert_K = self._exchange(self.expert_K[self.token_M])
        return self._exchange(tokens), self._exchange(probs)

    def _exchange(self, rows: torch.Tensor) -> torch.Tensor:
        received: torch.Tensor = all_to_all(self.ep_group, rows, self.n_received, self.n_sent)
        return received

    def _sorted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the place among all choices of each row, [N], and the row of each choice, [R, k]; -1: it has none."""
        local_RK = self.expert_K - self.ep_group.rank() * self.n_local_experts
        is_local = (local_RK >= 0) & (local_RK < self.n_local_experts)
        order = local_RK.where(is_local, self.n_local_experts).flatten().argsort(stable=True)
        return order[: self.n_rows], invert(order).view(local_RK.shape).where(is_local, -1)

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Send the sums back, and add what all ranks return for each token."""
        returned = all_to_all(self.ep_group, hidden_states, self.n_sent, self.n_received)
        tokens: torch.Tensor = _SumRows.apply(returned, self.sent_GS, self.token_M)
        del self.wanted_SG, self.sent_GS, self.token_M, self.numbers
        return tokens


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
    """rows[n] = tokens[token_N[n]]. row_GK holds the rows of each token's copies, -1 for none."""

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
