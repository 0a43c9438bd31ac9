"""Attention whose norms are over all query heads, and over all key heads, together."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from fivefold.engine.wide_norms import norms_over_heads
from fivefold.mcore.layers import PackedSelfAttention


class WideNorm(nn.Module):
    """The weight of such a norm: the channels of this rank's heads, `width` of them."""

    def __init__(self, config: TransformerConfig, width: int) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(width, dtype=config.params_dtype, device=device))
        # Every rank has other heads, so each counts in the gradient norm.
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=0, stride=1)


class WideNormAttention(PackedSelfAttention):
    """`PackedSelfAttention` with such norms before the rotation, in place of norms of heads."""

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        width = self.hidden_size_per_attention_head
        self.q_layernorm = WideNorm(config, self.num_attention_heads_per_partition * width)
        self.k_layernorm = WideNorm(config, self.num_query_groups_per_partition * width)

    def normalised(self, projected_TC: torch.Tensor) -> torch.Tensor:
        groups, width = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        heads = projected_TC.view(len(projected_TC), groups, -1, width)
        query, key = norms_over_heads(
            (heads[:, :, :-2].flatten(1), heads[:, :, -2].flatten(1)),
            (self.q_layernorm.weight, self.k_layernorm.weight),
            self.config.layernorm_epsilon,
            self.pg_collection.tp,
        )
        parts = (query.view(len(heads), groups, -1, width), key.view(len(heads), groups, 1, width), heads[:, :, -1:])
        return torch.cat(parts, dim=2).flatten(1)
