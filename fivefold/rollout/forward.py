"""Forward passes of the decode loop: of prompts, each distinct one once, and of one token in every row."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fivefold.rollout.kv_cache import RowCache
from fivefold.sinks import with_sinks

if TYPE_CHECKING:
    from fivefold.rollout.vision import Sight

_PREFILL_TOKENS = 16384
"""Most prompt tokens, padding included, in one forward; this bounds the activations of long prompts."""

Tokens = tuple[int, ...]


AfterPrompts = Callable[[int, list[Tokens], list[int]], None]
"""Called after the forward pass of distinct prompts, with the first row that has one of them, the prompts, the longest
first, and the index among them of each row's."""


def prefill(
    model: PreTrainedModel,
    cache: RowCache,
    sequences: Sequence[Tokens],
    after: AfterPrompts | None = None,
    sight: Sight | None = None,
) -> Tensor:
    """Fill an empty cache with a sequence for each row; return the logits [B, V] of the token after each.

    The longest sequences come first, and equal ones, with the same images, side by side. `after` is called after each
    forward pass; `sight` has the images of the rows.
    """
    logits = []
    keys: Sequence[Hashable] = sequences if sight is None else [*zip(sequences, sight.keys, strict=True)]
    for start, stop, firsts, source in _batches(sequences, keys, are_ragged=not has_states(model.config)):
        distinct = [sequences[row] for row in firsts]
        source_B = torch.tensor(source, device=model.device)
        cache.begin_prompts(slice(start, stop), source_B)
        seen = None if sight is None else sight.of(firsts)
        logits.append(_forward_prompts(model, cache, distinct, seen)[source_B])
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
    return _last_logits(model, cache, {"input_ids": tokens_B[:, None], "position_ids": position_B[:, None]}, mask)


def has_states(config: PreTrainedConfig) -> bool:
    """Return whether some layers are gated delta nets, whose states padding at the left would change."""
    return "linear_attention" in (getattr(config, "layer_types", None) or ())


def windows_of(config: PreTrainedConfig) -> dict[int, int]:
    """Return the tokens that each token sees in layers with a sliding window, by the layer's index."""
    window = getattr(config, "sliding_window", None)
    # Families that list the kind of each layer use the window in those layers alone.
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return {layer: window for layer, kind in enumerate(kinds) if window and kind == "sliding_attention"}


def _batches(
    sequences: Sequence[Tokens], keys: Sequence[Hashable], *, are_ragged: bool
) -> Iterator[tuple[int, int, list[int], list[int]]]:
    """Yield (first row, row behind the last, rows of distinct sequences, each row's index among these), in their order.

    Sequences with one key are the same. Sequences of a batch have one length, unless batches may be ragged.
    """
    start = 0
    firsts: list[int] = []
    source: list[int] = []
    for row, tokens in enumerate(sequences):
        if not firsts or keys[row] != keys[firsts[-1]]:
            is_full = bool(firsts) and len(sequences[firsts[0]]) * (len(firsts) + 1) > _PREFILL_TOKENS
            if is_full or (firsts and not are_ragged and len(sequences[firsts[0]]) != len(tokens)):
                yield start, row, firsts, source
                start, firsts, source = row, [], []
            firsts.append(row)
        source.append(len(firsts) - 1)
    yield start, len(sequences), firsts, source


def _forward_prompts(
    model: PreTrainedModel, cache: RowCache, prompts: list[Tokens], sight: Sight | None = None
) -> Tensor:
    """Return the logits [U, V] of the token after each of U distinct prompts."""
    width = len(prompts[0])
    padding = [width - len(prompt) for prompt in prompts]
    padding_U1 = torch.tensor(padding, device=model.device)[:, None]
    tokens_UP = torch.tensor([(0,) * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    columns_P = torch.arange(width, device=model.device)
    is_ragged = len(prompts[-1]) < width
    inputs = {"input_ids": tokens_UP, "position_ids": (columns_P - padding_U1).clamp_(min=0)}
    if sight is not None:
        inputs = sight.inputs(model, tokens_UP, padding)
    return _last_logits(model, cache, inputs, _prompt_mask(columns_P, padding_U1) if is_ragged else None)


def _prompt_mask(columns_P: Tensor, padding_U1: Tensor) -> Tensor:
    """Return bool [U, 1, P, P]: causal, without padding. Padding sees itself, because a softmax over nothing is NaN."""
    is_token_UP = columns_P >= padding_U1
    is_past_PP = columns_P[:, None] >= columns_P
    is_self_PP = columns_P[:, None] == columns_P
    return ((is_past_PP & is_token_UP[:, None, :]) | is_self_PP).unsqueeze(1)


def _last_logits(model: PreTrainedModel, cache: RowCache, inputs: Mapping[str, Tensor], mask: Tensor | None) -> Tensor:
    output = model(
        **inputs,
        attention_mask=mask,
        use_cache=True,
        logits_to_keep=1,
        **{cache_argument(type(model)): cache},  # type: ignore[arg-type]
    )
    logits: Tensor = output.logits[:, -1]
    return logits


@functools.cache
def cache_argument(model: type[PreTrainedModel]) -> str:
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
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
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
        sliding_window: tokens that each token sees; None: all before it. Of one new token's, the cache gives no others.
        s_aux: scores of the heads' sinks [H]; None: they have none.
        kwargs: ignored.

    Returns:
        The output [B, Q, H, V], and None for the attention weights.
    """
    batch, n_heads, n_queries, head_dim = query.shape
    n_groups, n_keys = key.shape[1:3]
    n_shared = n_heads // n_groups
    scale = head_dim**-0.5 if scaling is None else scaling
    if n_queries == 1:
        query = query.reshape(batch, n_groups, n_shared, head_dim)
        sinks = None if s_aux is None else s_aux.view(n_groups, n_shared)
        mask = None if attention_mask is None else attention_mask[..., -n_keys:]
        output = _attention(query, key, value, mask, sinks, scale, is_causal=False)
        return output.reshape(batch, 1, n_heads, value.shape[-1]), None
    if n_shared > 1:
        key, value = key.repeat_interleave(n_shared, dim=1), value.repeat_interleave(n_shared, dim=1)
    if sliding_window is not None and sliding_window < n_keys:
        attention_mask = _within(sliding_window, n_keys, attention_mask, query.device)
    sinks = None if s_aux is None else s_aux.unsqueeze(1)
    output = _attention(query, key, value, attention_mask, sinks, scale, is_causal=attention_mask is None)
    return output.transpose(1, 2).contiguous(), None


def _within(window: int, n_keys: int, mask: Tensor | None, device: torch.device) -> Tensor:
    """Return which pairs of a prompt's tokens attend, of those in a mask (None: causal), bool [B, 1, Q, K]."""
    columns_K = torch.arange(n_keys, device=device)
    distance_KK = columns_K[:, None] - columns_K
    seen_KK = (distance_KK >= 0) & (distance_KK < window)
    return seen_KK[None, None] if mask is None else mask & seen_KK


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    *,
    is_causal: bool,
) -> Tensor:
    """Compute attention, with sinks [heads, queries or 1] if there are any."""
    if sinks is not None:
        if mask is None:
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
            mask = (mask.tril() if is_causal else mask)[None, None]
        query, key, value, mask = with_sinks(query, key, value, mask, sinks, scale)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal and mask is None, scale=scale
    )
