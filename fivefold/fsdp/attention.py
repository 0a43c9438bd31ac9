"""Attention over packed sequences, registered with transformers under its own name."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fivefold.engine.context_parallel import packed_attention
from fivefold.engine.sequences import PackedAttention

ATTENTION_NAME = "fivefold_packed"


def register_attention() -> None:
    """Register `attend` with transformers as `attn_implementation=ATTENTION_NAME`.

    For a name without a mask function, transformers builds no masks: the packing says who sees whom.
    """
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attend)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedAttention,
    cp_group: dist.ProcessGroup,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the causal attention of packed sequences.

    Args:
        module: the layer, which this function does not use.
        query: float [1, H, T, D].
        key: float [1, KV, T, D].
        value: float [1, KV, T, V].
        attention_mask: None.
        packed: which queries see which keys.
        cp_group: the ranks that share the sequences.
        scaling: factor of the scores; None: 1 / sqrt(D).
        kwargs: what transformers passes besides; the families have no dropout.

    Returns:
        The output [1, T, H, V], and None for the attention weights.
    """
    query_THD, key_TKD, value_TKV = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return packed_attention(query_THD, key_TKD, value_TKV, packed, cp_group, scaling).unsqueeze(0), None
