"""Forward passes of the decode loop: of prompts, each distinct one once, and of one token in every row."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fivefold.rollout.kv_cache import RowCache

_PREFILL_TOKENS = 16384
"""Most prompt tokens, padding included, in one forward; this bounds the activations of long prompts."""

Tokens = tuple[int, ...]


AfterPrompts = Callable[[int, list[Tokens], list[int]], None]
"""Called after the forward pass of distinct prompts, with the first row that has one of them, the prompts, the longest
first, and the index among them of each row's."""


def prefill(
    model: PreTrainedModel, cache: RowCache, sequences: Sequence[Tokens], after: AfterPrompts | None = None
) -> Tensor:
    """Fill an empty cache with a sequence for each row; return the logits [B, V] of the token after each.

    The longest sequences come first, and equal ones side by side. `after` is called after each forward pass.
    """
    logits = []
    for start, stop, distinct, source in _batches(sequences, are_ragged=not has_states(model.config)):
        source_B = torch.tensor(source, device=model.device)
        cache.begin_prompts(slice(start, stop), source_B)
        logits.append(_forward_prompts(model, cache, distinct)[source_B])
        if after is not None:
            after(start, distinct, source)
    return torch.cat(logits)


def forward_token(
    model: PreTrainedModel, cache: RowCache, tokens_B: Tensor, position_B: Tensor, padding_B: Tensor | None
) -> Tensor:
    """Feed one token to every row; return the logits [B, V] of the next ones.

    Args:
        model: the model.
        cache: keys and values of the rows.
        tokens_B: int64.
        position_B: int64, position of each token in its sequence.
        padding_B: int64, masked columns at the left of each row; None: no row has any.
    """
    cache.begin_token()
    mask = None
    if padding_B is not None:
        columns = torch.arange(cache.length, device=model.device)
        mask = (columns >= padding_B[:, None])[:, None, None, :]
    return _last_logits(model, cache, tokens_B[:, None], position_B[:, None], mask)


def has_states(config: PreTrainedConfig) -> bool:
    """Return whether some layers are gated delta nets, whose states padding at the left would change."""
    return "linear_attention" in (getattr(config, "layer_types", None) or ())


def _batches(sequences: Sequence[Tokens], *, are_ragged: bool) -> Iterator[tuple[int, int, list[Tokens], list[int]]]:
    """Yield (first row, row behind the last, distinct sequences, each row's index among them), in the order of rows.

    Sequences of a batch have one length, unless batches may be ragged.
    """
    start = 0
    distinct: list[Tokens] = []
    source: list[int] = []
    for row, tokens in enumerate(sequences):
        if not distinct or tokens != distinct[-1]:
            is_full = bool(distinct) and len(distinct[0]) * (len(distinct) + 1) > _PREFILL_TOKENS
            if is_full or (distinct and not are_ragged and len(distinct[0]) != len(tokens)):
                yield start, row, distinct, source
                start, distinct, source = row, [], []
            distinct.append(tokens)
        source.append(len(distinct) - 1)
    yield start, len(sequences), distinct, source


def _forward_prompts(model: PreTrainedModel, cache: RowCache, prompts: list[Tokens]) -> Tensor:
    """Return the logits [U, V] of the token after each of U distinct prompts."""
    width = len(prompts[0])
    padding_U1 = torch.tensor([[width - len(prompt)] for prompt in prompts], device=model.device)
    tokens_UP = torch.tensor([(0,) * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    columns_P = torch.arange(width, device=model.device)
    is_ragged = len(prompts[-1]) < width
    return _last_logits(
        model,
        cache,
        tokens_UP,
        (columns_P - padding_U1).clamp_(min=0),
        _prompt_mask(columns_P, padding_U1) if is_ragged else None,
    )


def _prompt_mask(columns_P: Tensor, padding_U1: Tensor) -> Tensor:
    """Return bool [U, 1, P, P]: causal, without padding. Padding sees itself, because a softmax over nothing is NaN."""
    is_token_UP = columns_P >= padding_U1
    is_past_PP = columns_P[:, None] >= columns_P
    is_self_PP = columns_P[:, None] == columns_P
    return ((is_past_PP & is_token_UP[:, None, :]) | is_self_PP).unsqueeze(1)


def _last_logits(
    model: PreTrainedModel, cache: RowCache, tokens: Tensor, positions: Tensor, mask: Tensor | None
) -> Tensor:
    output = model(
        input_ids=tokens,
        position_ids=positions,
        attention_mask=mask,
        use_cache=True,
        logits_to_keep=1,
        **{_cache_argument(type(model)): cache},  # type: ignore[arg-type]
    )
    logits: Tensor = output.logits[:, -1]
    return logits


@functools.cache
def _cache_argument(model: type[PreTrainedModel]) -> str:
    """Return the name under which a model takes its cache.

    Newer releases of transformers call it `cache`, and warn of the older name; once the floor is one of them, there is
    one name.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


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
