"""Gated delta nets of transformers' models over packed sequences, whose boundaries transformers' own would cross."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fivefold.engine.context_parallel import PackedAttention
from fivefold.engine.delta_net import DeltaWeights, mix_tokens
from fivefold.families.delta_net import DeltaNet


def pack_delta_net(module: Any, sizes: DeltaNet, eps: float) -> None:
    """Make a gated delta net of transformers, or this rank's heads of it, compute packed sequences."""
    module.forward = partial(_forward, module, sizes, eps)


def _forward(
    module: Any,
    sizes: DeltaNet,
    eps: float,
    hidden_states: torch.Tensor,
    *,
    packed: PackedAttention,
    cp_group: dist.ProcessGroup,
    **_unused: Any,
) -> torch.Tensor:
    """Return the output [1, T, hidden] of packed tokens [1, T, hidden]."""
    projected = _projected(module, sizes, hidden_states[0])
    conv = _by_key_head(module.conv1d.weight.flatten(1), sizes, dim=0).flatten(0, 1).unsqueeze(1)
    weights = DeltaWeights(conv, module.A_log, module.dt_bias, module.norm.weight)
    output: torch.Tensor = module.out_proj(mix_tokens(projected, weights, sizes, packed.spans, eps, cp_group))
    return output.unsqueeze(0)


def _projected(module: Any, sizes: DeltaNet, hidden_TH: torch.Tensor) -> torch.Tensor:
    """Return the projections of tokens, grouped by key head."""
    if sizes.is_grouped:
        parts = [module.in_proj_qkvz(hidden_TH), module.in_proj_ba(hidden_TH)]
        n_heads = parts[0].shape[1] // (
            2 * (sizes.key_dim + sizes.value_dim * sizes.n_value_heads // sizes.n_key_heads)
        )
        return torch.cat([part.unflatten(1, (n_heads, -1)) for part in parts], dim=2).flatten(1)
    joint = _by_key_head(module.in_proj_qkv(hidden_TH), sizes, dim=1)
    others = [module.in_proj_z(hidden_TH), module.in_proj_b(hidden_TH), module.in_proj_a(hidden_TH)]
    return torch.cat([joint, *(part.unflatten(1, (joint.shape[1], -1)) for part in others)], dim=2).flatten(1)


def _by_key_head(convolved: torch.Tensor, sizes: DeltaNet, dim: int) -> torch.Tensor:
    """Return channels that are all queries, all keys and all values, along `dim`, as [key heads, channels of each]."""
    n_heads = convolved.shape[dim] * sizes.n_key_heads // sizes.convolved_width
    widths = [n_heads * sizes.key_dim, n_heads * sizes.key_dim]
    widths.append(convolved.shape[dim] - sum(widths))
    return torch.cat([part.unflatten(dim, (n_heads, -1)) for part in convolved.split(widths, dim)], dim=dim + 1)
