"""Attention for generation with grouped key-value heads, registered with transformers under its own name."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "fivefold_rollout"


def register_attention() -> None:
    """Register `rollout_attention` with transformers as `attn_implementation=ATTENTION_NAME`.

    For a name without a mask function, transformers builds no masks: `rollout_attention` gets the mask that is given to
    the model's forward, or None.
    """
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, rollout_attention)


def rollout_kernels() -> AbstractContextManager[None]:
    """Return a context in which attention uses all kernels but cuDNN's.

    cuDNN takes tens of milliseconds to plan for each new shape, and a growing cache is a new shape at every token. For
    256 rows of 8 layers on an H200, a token takes 39 ms with cuDNN and 10 ms without.
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
    """Compute attention of whole prompts (causal if there is no mask) or of one new token in each row.

    With one query token, the query heads that share a key head take the place of the sequence: [B, H, 1, D] becomes
    [B, KV, H / KV, D]. The cache is then read once, and not repeated H / KV times.

    Args:
        module: the layer, which this function does not use.
        query: float [B, H, Q, D].
        key: float [B, KV, K, D].
        value: float [B, KV, K, V].
        attention_mask: bool [B, 1, Q, K], True where a query may look; None: causal.
        dropout: ignored, because generation has no dropout.
        scaling: factor of the scores; None: 1 / sqrt(D).
        kwargs: ignored.

    Returns:
        The output [B, Q, H, V], and None for the attention weights.
    """
    batch, n_heads, n_queries, head_dim = query.shape
    n_shared = n_heads // key.shape[1]
    if n_queries == 1:
        grouped = query.reshape(batch, key.shape[1], n_shared, head_dim)
        output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
        return output.reshape(batch, 1, n_heads, value.shape[-1]), None
    if n_shared > 1:
        key, value = key.repeat_interleave(n_shared, dim=1), value.repeat_interleave(n_shared, dim=1)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, is_causal=attention_mask is None, scale=scaling
    )
    return output.transpose(1, 2).contiguous(), None
