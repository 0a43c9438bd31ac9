"""Attention for generation over grouped key-value heads, registered with transformers under a name of its own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "fivefold_rollout"


def register_attention() -> None:
    """Make `attn_implementation=ATTENTION_NAME` known to transformers.

    transformers builds no masks for a name without a mask function: the mask given to the model's forward, or None,
    arrives at `rollout_attention` as it is.
    """
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, rollout_attention)


def rollout_kernels() -> AbstractContextManager[None]:
    """The kernels to generate with: all but cuDNN's, which take tens of milliseconds to plan for each new shape.

    A growing cache is a new shape at every token: 39 ms a token, against 10 ms with these, for 256 rows of 8 layers on
    an H200.
    """
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def rollout_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of whole prompts (causal where no mask is given) or of one new token a row.

    One query token leaves no order among the query heads that share a key head, so they take the place of the sequence:
    [B, H, 1, D] becomes [B, KV, H / KV, D], and the cache is read once rather than repeated H / KV times.

    Args:
        query: [B, H, Q, D].
        key, value: [B, KV, K, D].
        attention_mask: bool [B, 1, Q, K], True where a query may look.

    Returns:
        [B, Q, H, D], and None for the attention weights.
    """
    batch, n_heads, n_queries, head_dim = query.shape
    n_shared = n_heads // key.shape[1]
    if n_queries == 1:
        grouped = query.reshape(batch, key.shape[1], n_shared, head_dim)
        output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
        return output.reshape(batch, 1, n_heads, head_dim), None
    if n_shared > 1:
        key, value = key.repeat_interleave(n_shared, dim=1), value.repeat_interleave(n_shared, dim=1)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, is_causal=attention_mask is None, scale=scaling
    )
    return output.transpose(1, 2).contiguous(), None
