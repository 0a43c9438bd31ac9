"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1) on packed sequences.

    x ─down─> query latent ─norm─> up ─> queries          [T, heads of this rank, nope + rope]
    x ─down─> latent ─norm─> up ─> keys | values          [T, heads of this rank, nope | value]
         └──> key with position, the same for all heads   [T, 1, rope]

The projections down and the norms are whole on every tensor-parallel rank, and see the rank's tokens alone. The
projections up are split by heads, and gather the tokens of all ranks. The parameters have the names and the shapes of
Megatron-Core's `MLASelfAttention`, which splits the projections down too where TransformerEngine is not installed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from fivefold.engine.context_parallel import packed_attention
from fivefold.engine.kernels import rotate_halves, rotate_neighbours
from fivefold.families.shape import LatentAttention
from fivefold.mcore.attention import PackedSequences

LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms on latents, in transformers and in DeepSeek's own code whatever the model's `rms_norm_eps`."""


class WholeLinear(nn.Module):
    """A projection that every tensor-parallel rank has whole; its gradient is summed over the ranks' tokens."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class LatentSelfAttention(nn.Module):
    """The attention of one layer, on [T / tp, 1, hidden] packed tokens.

    Args:
        config: Megatron-Core's configuration of the model.
        latent: the sizes.
        norm: the class of the norms, which takes the configuration, a width and an epsilon.
        pg_collection: the groups of this rank.
    """

    def __init__(
        self, config: TransformerConfig, *, latent: LatentAttention, norm: Any, pg_collection: Any, **_unused: Any
    ) -> None:
        super().__init__()
        self.latent = latent
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.n_heads = config.num_attention_heads // pg_collection.tp.size()
        self.recomputes = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        hidden, n_heads = config.hidden_size, config.num_attention_heads
        options = {"config": config, "bias": False, "tp_group": pg_collection.tp, "init_method": config.init_method}
        if latent.query_rank is None:
            self.linear_q_proj = ColumnParallelLinear(hidden, n_heads * latent.qk_dim, **options)
        else:
            self.linear_q_down_proj = WholeLinear(config, hidden, latent.query_rank)
            self.q_layernorm = norm(config, latent.query_rank, LATENT_NORM_EPS)
            self.linear_q_up_proj = ColumnParallelLinear(latent.query_rank, n_heads * latent.qk_dim, **options)
        self.linear_kv_down_proj = WholeLinear(config, hidden, latent.kv_rank + latent.rope_dim)
        self.kv_layernorm = norm(config, latent.kv_rank, LATENT_NORM_EPS)
        self.linear_kv_up_proj = ColumnParallelLinear(
            latent.kv_rank, n_heads * (latent.nope_dim + latent.value_dim), **options
        )
        self.linear_proj = RowParallelLinear(
            n_heads * latent.value_dim, hidden, input_is_parallel=True, skip_bias_add=True, **options
        )

    def forward(
        self, hidden_states: torch.Tensor, *, packed_seq_params: PackedSequences, **_unused: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        latent, shared_key = self.linear_kv_down_proj(hidden_states).split(
            (self.latent.kv_rank, self.latent.rope_dim), dim=-1
        )
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        if self.tp_group.size() > 1:
            # Each rank's heads use the keys of all tokens, so that the gradients of all ranks are summed.
            shared_key = gather_from_sequence_parallel_region(shared_key.contiguous(), group=self.tp_group)
        attend = partial(self._attend, packed=packed_seq_params)
        projected = (self._queries(hidden_states), key_value, shared_key)
        if self.recomputes and torch.is_grad_enabled():
            output = tensor_parallel.checkpoint(attend, False, *projected)
        else:
            output = attend(*projected)
        return self.linear_proj(output)

    def _queries(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.latent.query_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))
        return query

    def _attend(
        self, query: torch.Tensor, key_value: torch.Tensor, shared_key: torch.Tensor, *, packed: PackedSequences
    ) -> torch.Tensor:
        """Return the attention [T, 1, heads * value] of projections [T, 1, ...], before the output projection."""
        sizes, n_tokens = self.latent, query.shape[0]
        rotate = rotate_neighbours if sizes.rotates_neighbours else rotate_halves
        query, turned = query.view(n_tokens, self.n_heads, -1).split((sizes.nope_dim, sizes.rope_dim), dim=-1)
        key, value = key_value.view(n_tokens, self.n_heads, -1).split((sizes.nope_dim, sizes.value_dim), dim=-1)
        turned = rotate(turned, packed.cos_T1D, packed.sin_T1D)
        shared_key = rotate(shared_key, packed.cos_T1D, packed.sin_T1D).expand(-1, self.n_heads, -1)
        query, key = torch.cat((query, turned), dim=-1), torch.cat((key, shared_key), dim=-1)
        output = packed_attention(query, key, value, packed.attention, self.cp_group, sizes.score_scale)
        return output.flatten(1).unsqueeze(1)
