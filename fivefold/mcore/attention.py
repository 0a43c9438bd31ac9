"""Self-attention on packed sequences, with context parallelism, over Megatron-Core's parallel linear layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from torch import nn

from fivefold.engine.context_parallel import PackedAttention
from fivefold.engine.kernels.elementwise import split_heads
from fivefold.engine.sequences import packed_attention


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """Values that Megatron-Core passes to every layer unchanged: the packing, and the rotation of each token."""

    attention: PackedAttention
    cos_T1D: torch.Tensor
    """[T, 1, rotated channels], in the model's dtype: cosines of the rotation at each token's position."""
    sin_T1D: torch.Tensor
    """[T, 1, rotated channels]: sines of the same rotation."""


class PackedSelfAttention(SelfAttention):
    """Megatron-Core's self-attention, its projections and q/k norms, on [T, 1, hidden] packed tokens."""

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
        query, key, value = split_heads(
            projected.squeeze(1),
            self.q_layernorm.weight if self.config.qk_layernorm else None,
            self.k_layernorm.weight if self.config.qk_layernorm else None,
            packed.cos_T1D,
            packed.sin_T1D,
            self.num_query_groups_per_partition,
            self.config.layernorm_epsilon,
            self.hidden_size_per_attention_head,
        )
        return self.core_attention(query, key, value, packed.attention).flatten(1).unsqueeze(1)


class PackedCoreAttention(nn.Module):
    """Softmax attention of the local queries over the keys of the whole context-parallel group."""

    def __init__(self, *, pg_collection: Any, **_unused: Any) -> None:
        super().__init__()
        self.cp_group: dist.ProcessGroup = pg_collection.cp

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedAttention
    ) -> torch.Tensor:
        """Attend from query [T, heads, d] with key and value [T, kv_heads, d], all of this rank's tokens.

        Returns:
            [T, heads, d].
        """
        return packed_attention(query, key, value, packed, self.cp_group)
