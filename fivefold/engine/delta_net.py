"""What a gated delta net does between its projections, on packed sequences: every engine has the same.

projection ─> q k v ─convolution, silu─> gated delta rule ─norm─> * silu(z) ─> output projection
          └─> z                                      ^
          └─> b, a ─> beta, decay ───────────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fivefold.engine.context_parallel import heads_of_all_tokens, tokens_of_all_heads
from fivefold.engine.kernels.delta_rule import gated_delta_rule, packed_convolution
from fivefold.engine.kernels.fla_delta_rule import computes, fla_gated_delta_rule
from fivefold.families.delta_net import DeltaNet


@dataclass(frozen=True)
class DeltaWeights:
    """The parameters of some heads besides the projections."""

    conv_C1K: torch.Tensor
    """Weights of the convolution, whose channels are queries, keys and values, grouped by key head."""
    decay_V: torch.Tensor
    """Logarithm of each value head's decay (`A_log`)."""
    bias_V: torch.Tensor
    """Offset of each value head's decay (`dt_bias`)."""
    norm_E: torch.Tensor
    """Weight of the norm of each value head's output."""

    def share(self, group: dist.ProcessGroup) -> DeltaWeights:
        """Return the parameters of this rank's equal share of the heads."""
        size, rank = group.size(), group.rank()
        conv, decay, bias = (each.chunk(size)[rank] for each in (self.conv_C1K, self.decay_V, self.bias_V))
        return DeltaWeights(conv, decay, bias, self.norm_E)


def mix_tokens(
    projected_TC: torch.Tensor,
    weights: DeltaWeights,
    sizes: DeltaNet,
    spans: tuple[int, ...],
    eps: float,
    cp_group: dist.ProcessGroup,
) -> torch.Tensor:
    """Return the gated output [T, value heads * E] of some key heads and their value heads.

    Args:
        projected_TC: the projection of this rank's tokens, as `_mix` takes it.
        weights: the other parameters of the same heads.
        sizes: sizes of the whole layer.
        spans: tokens of each packed sequence.
        eps: epsilon of the norm.
        cp_group: the ranks that share the sequences. Each computes a share of the heads.
    """
    if cp_group.size() == 1:
        return _mix(projected_TC, weights, sizes, spans, eps)
    whole = heads_of_all_tokens(projected_TC, spans, cp_group)
    return tokens_of_all_heads(_mix(whole, weights.share(cp_group), sizes, spans, eps), spans, cp_group)


def _mix(
    projected_TC: torch.Tensor, weights: DeltaWeights, sizes: DeltaNet, spans: tuple[int, ...], eps: float
) -> torch.Tensor:
    """Return the gated output [T, value heads * E] of some key heads and their value heads.

    Args:
        projected_TC: the projection: for each key head its query, key, values, gates, betas and decays.
        weights: the other parameters of the same heads.
        sizes: sizes of the whole layer.
        spans: tokens of each packed sequence.
        eps: epsilon of the norm.
    """
    n_tokens, shared = len(projected_TC), sizes.n_value_heads // sizes.n_key_heads
    values = shared * sizes.value_dim
    heads = projected_TC.view(n_tokens, -1, sizes.input_width // sizes.n_key_heads)
    convolved, gate, beta, decay = heads.split((2 * sizes.key_dim + values, values, shared, shared), dim=-1)
    convolved = F.silu(packed_convolution(convolved.flatten(1), weights.conv_C1K, spans)).view_as(convolved)
    query, key, value = convolved.split((sizes.key_dim, sizes.key_dim, values), dim=-1)
    decay_TV = -weights.decay_V.float().exp() * F.softplus(decay.flatten(1).float() + weights.bias_V)
    per_head = (n_tokens, -1, sizes.value_dim)
    value = value.reshape(per_head)
    rule = fla_gated_delta_rule if computes(key, value) else gated_delta_rule
    output = rule(query, key, value, decay_TV, beta.flatten(1).sigmoid(), spans)
    # Rounded after the norm and after the gate, as in transformers.
    normed = weights.norm_E * F.rms_norm(output.float(), (sizes.value_dim,), eps=eps).to(output.dtype)
    return (normed * F.silu(gate.reshape(per_head).float())).to(output.dtype).flatten(1)
