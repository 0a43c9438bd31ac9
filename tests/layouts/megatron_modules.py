"""Modules for Megatron-Core's models in place of those that it takes from TransformerEngine or Megatron-Bridge defines.

Their parameters have the names and the shards that they have there; each is the shortest form of its formula.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class UnlikeHeads(torch.nn.Module):
    """Attention whose values have a width of their own, which Megatron-Core takes from TransformerEngine."""

    def __init__(self, *, softmax_scale: float, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Attend from query [S, B, heads, d]. Returns [S, B, heads * v]."""
        heads = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        output = F.scaled_dot_product_attention(*heads, is_causal=True, scale=self.scale)
        return output.permute(2, 0, 1, 3).flatten(2)


class CentredNorm(torch.nn.Module):
    """RMSNorm that multiplies by 1 + weight, as TransformerEngine's with `zero_centered_gamma`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.zeros(hidden_size)), eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return (1 + self.weight) * F.rms_norm(hidden, hidden.shape[-1:], eps=self.eps)


class WideNorm(torch.nn.Module):
    """RMSNorm over all heads together, of which this rank has some, as Megatron-Bridge has it for MiniMax-M2."""

    n_heads: str
    """Name of the field with the number of all heads."""

    def __init__(self, hidden_size: int, config: TransformerConfig, eps: float, **_: Any) -> None:
        super().__init__()
        self.group, self.eps = parallel_state.get_tensor_model_parallel_group(), eps
        self.width = getattr(config, self.n_heads) * hidden_size
        self.weight = torch.nn.Parameter(torch.ones(self.width // self.group.size()))

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        """Normalise [S, B, heads, d]."""
        flat = heads.flatten(2)
        squares = flat.pow(2).sum(-1, keepdim=True)
        torch.distributed.all_reduce(squares, group=self.group)
        return (self.weight * flat * torch.rsqrt(squares / self.width + self.eps)).view_as(heads)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        )


class QueryNorm(WideNorm):
    n_heads = "num_attention_heads"


class KeyNorm(WideNorm):
    n_heads = "num_query_groups"


class PostNormLinear(RowParallelLinear):
    """A linear layer with a norm of its output, as Megatron-Bridge has it for Gemma 3."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.post_layernorm = CentredNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        output, _ = super().forward(hidden)
        return self.post_layernorm(output), None


class TwoRopes(SelfAttention):
    """Attention that has other rotary positions in layers with a sliding window."""

    def __init__(self, config: TransformerConfig, *args: Any, local_theta: float, **options: Any) -> None:
        super().__init__(config, *args, **options)
        is_local = config.window_attn_skip_freq[self.layer_number - 1]
        self.rope = RotaryEmbedding(config.kv_channels, 1.0, rotary_base=local_theta) if is_local else None

    def forward(self, hidden: torch.Tensor, *args: Any, rotary_pos_emb: torch.Tensor, **options: Any) -> Any:
        positions = rotary_pos_emb if self.rope is None else self.rope(len(hidden))
        return super().forward(hidden, *args, rotary_pos_emb=positions, **options)


def delta_net() -> ModuleSpec:
    """Return the spec of Megatron-Core's gated delta net, which computes in torch where the config is deterministic."""
    for parent in GatedDeltaNet.__mro__:
        module = sys.modules[parent.__module__]
        if hasattr(module, "HAVE_FLA"):
            # It asks for the package even where it does not use it, but for this function.
            vars(module).update(HAVE_FLA=True, l2norm=_unit)
    # torch.compile would take longer than the tests.
    torch.compiler.set_stance("force_eager")
    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=CentredNorm, out_proj=RowParallelLinear)
    return ModuleSpec(module=GatedDeltaNet, submodules=parts)


def _unit(heads: torch.Tensor) -> torch.Tensor:
    return heads * torch.rsqrt(heads.pow(2).sum(-1, keepdim=True) + 1e-6)
