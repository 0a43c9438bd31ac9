"""Tensor parallelism of transformers' layers: each rank has some of the heads and some columns of each MLP.

    x ─copy─> q, k, v, gate, up: rows of this rank ─> o, down: columns of this rank ─sum over ranks─> + x

Everything outside these blocks, and its gradient, is the same on all ranks of the group: a block's input is copied,
which sums its gradient over the ranks, and a block's output is summed, which copies its gradient. Only weights that all
ranks have whole and use for their own heads alone have gradients to be summed: `is_used_in_parts` says which.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fivefold.bridge.mapping import WeightMapping, padded_vocab
from fivefold.engine.context_parallel import SumOverGroup, copy_to_group
from fivefold.engine.wide_norms import norms_over_heads
from fivefold.fsdp.experts import add_once

_SHARED_BY_HEADS = {"q_norm", "k_norm", "q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"}


class VocabEmbedding(nn.Module):
    """An embedding whose rows are spread over the ranks; what it returns is multiplied by `scale`."""

    def __init__(self, vocab: int, hidden: int, group: dist.ProcessGroup, scale: float) -> None:
        super().__init__()
        self._scale = scale
        self.rows = padded_vocab(vocab, group.size()) // group.size()
        self.weight = nn.Parameter(torch.empty(self.rows, hidden))
        self._group = group

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens of any shape, [..., hidden]."""
        own = tokens - self._group.rank() * self.rows
        is_own = (own >= 0) & (own < self.rows)
        embedded = F.embedding(own.clamp(0, self.rows - 1), self.weight) * is_own.unsqueeze(-1)
        whole: torch.Tensor = SumOverGroup.apply(embedded, self._group)
        return whole if self._scale == 1 else whole * self._scale


def split_layer(layer: Any, group: dist.ProcessGroup, *, wide_norms: bool) -> None:
    """Make a decoder layer, which has this rank's part of the parameters, exchange what it must with the group.

    Args:
        layer: the layer.
        group: the tensor-parallel ranks.
        wide_norms: whether its norms of queries and keys are over all heads together.
    """

    def copy(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        def copied(value: Any) -> Any:
            return copy_to_group(value, group) if torch.is_tensor(value) and value.requires_grad else value

        hidden = {name: copied(value) for name, value in kwargs.items() if name == "hidden_states"}
        return tuple(map(copied, args)), kwargs | hidden

    def total(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        return SumOverGroup.apply(output, group)

    has_delta_net = hasattr(layer, "linear_attn")
    mixer = layer.linear_attn if has_delta_net else layer.self_attn
    mixer.register_forward_pre_hook(copy, with_kwargs=True)
    output = mixer.out_proj if has_delta_net else mixer.o_proj
    output.register_forward_hook(total)
    if output.bias is not None and group.rank() > 0:
        output.forward = partial(_without_bias, output)
    if wide_norms:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.forward = partial(_wide_norm, norm, group=group)
    for block in _split_mlps(layer.mlp):
        block.register_forward_pre_hook(copy, with_kwargs=True)
        # Fused experts have no module for their down projection.
        (block.down_proj if isinstance(block.down_proj, nn.Module) else block).register_forward_hook(total)
        if hasattr(block, "down_proj_bias"):
            add_once(block, "down_proj_bias", adds=group.rank() == 0)


def _without_bias(linear: Any, x: torch.Tensor) -> torch.Tensor:
    """Compute a linear layer whose bias the first rank adds to the sum; all ranks know its whole gradient."""
    return F.linear(x, linear.weight, linear.bias - linear.bias.detach())


def _wide_norm(norm: Any, heads: torch.Tensor, *, group: dist.ProcessGroup) -> torch.Tensor:
    return norms_over_heads([heads], [norm.weight], norm.variance_epsilon, group)[0]


def _split_mlps(mlp: Any) -> list[Any]:
    """Return the parts of a layer's MLP that are split: all of a dense one; the experts of an MoE, shared ones too."""
    if not hasattr(mlp, "experts"):
        return [mlp]
    shared = [getattr(mlp, name) for name in ("shared_expert", "shared_experts") if hasattr(mlp, name)]
    return [mlp.experts, *shared]


def is_used_in_parts(mapping: WeightMapping) -> bool:
    """Return whether all ranks have a parameter whole and a part of its gradient each, which is summed over the group.

    They are the norms of queries and keys, and of the outputs of gated delta nets, what makes the latents of multi-head
    latent attention, and the matrices of adapters that are not cut.
    """
    path, _, name = mapping.parameter.removesuffix(".weight").rpartition(".")
    is_shared = mapping.is_whole and (
        name in _SHARED_BY_HEADS if path.endswith(".self_attn") else path.endswith(".linear_attn") and name == "norm"
    )
    return is_shared or (mapping.is_adapter and mapping.is_whole)
