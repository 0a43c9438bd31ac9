"""Attention over packed sequences, registered with transformers under its own name."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fivefold.engine.context_parallel import PackedAttention, gathered_keys
from fivefold.engine.kernels.varlen import varlen_attention
from fivefold.engine.sequences import packed_attention

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
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the causal attention of packed sequences.

    Args:
        module: the layer.
        query: float [1, H, T, D].
        key: float [1, KV, T, D]; if the layer gathers latents, [1, KV, K, D] of all tokens that the queries see.
        value: float [1, KV, T, V], or as many tokens as the keys.
        attention_mask: None.
        packed: which queries see which keys.
        cp_group: the ranks that share the sequences.
        scaling: factor of the scores; None: 1 / sqrt(D).
        sliding_window: tokens that each token sees; None: all before it.
        s_aux: scores of the heads' sinks [H]; None: they have none.
        kwargs: what transformers passes besides; the families have no dropout.

    Returns:
        The output [1, T, H, V], and None for the attention weights.
    """
    query_THD, key_TKD, value_TKV = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if isinstance(vars(module).get("expand_kv"), _GatheredLatents):
        output_THV = varlen_attention(query_THD, key_TKD, value_TKV, packed.plan, scaling)
    else:
        output_THV = packed_attention(
            query_THD, key_TKD, value_TKV, packed, cp_group, scaling, window=sliding_window, sinks=s_aux
        )
    return output_THV.unsqueeze(0), None


class _GatheredLatents:
    """Makes keys and values of the latents of all tokens that this rank's queries see, in a layer's `expand_kv`."""

    def __init__(self, attention: Any, group: dist.ProcessGroup) -> None:
        self._expand = attention.expand_kv
        self._group = group
        self._packed: PackedAttention | None = None

    def note(self, _module: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the packing that the layer is called with."""
        self._packed = kwargs["packed"]

    def __call__(self, latent: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [1, H, K, ...] of latents [1, 1, T, R] and of keys with positions [1, 1, T, P]."""
        assert self._packed is not None
        widths = (latent.shape[-1], key.shape[-1])
        joint = gathered_keys(torch.cat((latent, key), dim=-1)[0, 0], self._packed, self._group)
        latent, key = (rows[None, None] for rows in joint.split(widths, dim=-1))
        keys, values = self._expand(latent, key)
        return keys, values


def gather_latents(attention: Any, group: dist.ProcessGroup) -> None:
    """Let multi-head latent attention gather latents over the context-parallel group, in place of keys and values.

    The releases of transformers that make keys and values in `expand_kv` can do so.
    """
    if hasattr(attention, "expand_kv"):
        latents = _GatheredLatents(attention, group)
        attention.register_forward_pre_hook(latents.note, with_kwargs=True)
        attention.expand_kv = latents
