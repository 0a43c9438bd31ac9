"""Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1) on packed sequences.

    x ─down─> query latent ─norm─> up ─> queries          [T, heads of this rank, nope + rope]
    x ─down─> latent ─norm─> up ─> keys | values          [T, heads of this rank, nope | value]
         └──> key with position, the same for all heads   [T, 1, rope]

The projections down and the norms are whole on every tensor-parallel rank, and see the rank's tokens alone. The
projections up are split by heads, and gather the tokens of all ranks. Context-parallel ranks gather latents too, and
each makes keys and values of all tokens that its queries see: of DeepSeek-V3, 576 channels travel in place of 40,960.

The parameters have the names and the shapes of Megatron-Core's `MLASelfAttention`, which splits the projections down
too where TransformerEngine is not installed.
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

from fivefold.engine.context_parallel import gathered_keys
from fivefold.engine.kernels.elementwise import rotate_halves, rotate_neighbours
from fivefold.engine.kernels.varlen import varlen_attention
from fivefold.families.latent import LatentAttention
from fivefold.mcore.layers import PackedSequences

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
        self.rotate = rotate_neighbours if latent.rotates_neighbours else rotate_halves
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
        self.linear_kv_down_proj = WholeLinear(config, hidden, latent.shared_dim)
        self.kv_layernorm = norm(config, latent.kv_rank, LATENT_NORM_EPS)
        gathers_latents = self.cp_group.size() > 1
        self.linear_kv_up_proj = ColumnParallelLinear(
            latent.kv_rank,
            n_heads * (latent.nope_dim + latent.value_dim),
            disable_grad_reduce=gathers_latents,
            **options,
        )
        if gathers_latents:
            # Its input comes from the ranks of both groups, and goes back to them, outside of it.
            self.linear_kv_up_proj.sequence_parallel = False
        self.linear_proj = RowParallelLinear(
            n_heads * latent.value_dim, hidden, input_is_parallel=True, skip_bias_add=True, **options
        )

    def forward(
        self, hidden_states: torch.Tensor, *, packed_seq_params: PackedSequences, **_unused: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        latent, shared_key = self._latents(hidden_states, packed_seq_params)
        query = self._queries(hidden_states)
        if self.cp_group.size() > 1:
            projected = (query, *self._gathered_latents(latent, shared_key, packed_seq_params))
            attend = partial(self._attend_to_latents, packed=packed_seq_params)
        else:
            projected = (query, self.linear_kv_up_proj(latent)[0], self._of_all_tokens(shared_key))
            attend = partial(self._attend, packed=packed_seq_params)
        if self.recomputes and torch.is_grad_enabled():
            output = tensor_parallel.checkpoint(attend, False, *projected)
        else:
            output = attend(*projected)
        return self.linear_proj(output)

    def _latents(self, hidden_states: torch.Tensor, packed: PackedSequences) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the latent and the key with position of this rank's tokens, [T / tp, 1, ...]."""
        latent, shared_key = self.linear_kv_down_proj(hidden_states).split(
            (self.latent.kv_rank, self.latent.rope_dim), dim=-1
        )
        tp, rank = self.tp_group.size(), self.tp_group.rank()
        cos, sin = (table.chunk(tp)[rank] for table in (packed.cos_T1D, packed.sin_T1D))
        return self.kv_layernorm(latent), self.rotate(shared_key, cos, sin)

    def _of_all_tokens(self, local: torch.Tensor) -> torch.Tensor:
        """Return [T, 1, ...] of the tensor-parallel ranks' parts [T / tp, 1, ...]; gradients of all ranks are summed.

        Each rank's heads use the keys of all tokens.
        """
        if self.tp_group.size() == 1:
            return local
        gathered: torch.Tensor = gather_from_sequence_parallel_region(local.contiguous(), group=self.tp_group)
        return gathered

    def _gathered_latents(
        self, latent: torch.Tensor, shared_key: torch.Tensor, packed: PackedSequences
    ) -> tuple[torch.Tensor, ...]:
        """Return latent and key [K, 1, ...] of the tokens of all ranks that this rank's queries see."""
        joint = self._of_all_tokens(torch.cat((latent, shared_key), dim=-1))
        return gathered_keys(joint, packed.attention, self.cp_group).split(
            (self.latent.kv_rank, self.latent.rope_dim), dim=-1
        )

    def _queries(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.latent.query_rank is None:
            query, _ = self.linear_q_proj(hidden_states)
        else:
            query, _ = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(hidden_states)))
        return query

    def _attend_to_latents(
        self, query: torch.Tensor, latent: torch.Tensor, shared_key: torch.Tensor, *, packed: PackedSequences
    ) -> torch.Tensor:
        """Return the attention as `_attend`, with keys and values that are made of latents [K, 1, rank]."""
        return self._attend(query, self.linear_kv_up_proj(latent)[0], shared_key, packed=packed)

    def _attend(
        self, query: torch.Tensor, key_value: torch.Tensor, shared_key: torch.Tensor, *, packed: PackedSequences
    ) -> torch.Tensor:
        """Return the attention [T, 1, heads * value] before the output projection.

        Args:
            query: [T, 1, heads * (nope + rope)], not rotated.
            key_value: [K, 1, heads * (nope + value)] of the tokens that the queries see.
            shared_key: [K, 1, rope], rotated.
            packed: the packing.
        """
        sizes, heads = self.latent, (self.n_heads, -1)
        query, turned = query.view(len(query), *heads).split((sizes.nope_dim, sizes.rope_dim), dim=-1)
        key, value = key_value.view(len(key_value), *heads).split((sizes.nope_dim, sizes.value_dim), dim=-1)
        query = torch.cat((query, self.rotate(turned, packed.cos_T1D, packed.sin_T1D)), dim=-1)
        key = torch.cat((key, shared_key.expand(-1, self.n_heads, -1)), dim=-1)
        output = varlen_attention(query, key, value, packed.attention.plan, sizes.score_scale)
        return output.flatten(1).unsqueeze(1)
