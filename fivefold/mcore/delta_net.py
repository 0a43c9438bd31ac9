"""A gated delta net (Yang et al. 2024, https://arxiv.org/abs/2412.06464) as the token mixer of a layer.

Tensor parallelism divides the heads: key heads, and the value heads of each. The rows of the projection and of the
convolution are grouped by key head, whatever their order is in files. Context-parallel ranks exchange the tokens of all
heads for all tokens of some.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.utils import divide
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from fivefold.engine.delta_net import DeltaWeights, mix_tokens
from fivefold.families.delta_net import DeltaNet
from fivefold.mcore.layers import PackedSequences


class GatedDeltaNet(nn.Module):
    """The token mixer of one layer, on [T / tp, 1, hidden] packed tokens.

    Args:
        config: Megatron-Core's configuration of the model.
        sizes: the sizes.
        pg_collection: the groups of this rank.
    """

    def __init__(self, config: TransformerConfig, *, sizes: DeltaNet, pg_collection: Any, **_unused: Any) -> None:
        super().__init__()
        self.sizes, self.eps = sizes, config.layernorm_epsilon
        self.recomputes = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules
        tp, self.cp_group = pg_collection.tp.size(), pg_collection.cp
        options = {"config": config, "bias": False, "tp_group": pg_collection.tp, "init_method": config.init_method}
        self.in_proj = ColumnParallelLinear(config.hidden_size, sizes.input_width, **options)
        self.conv1d = _Weight(_empty(config, divide(sizes.convolved_width, tp), 1, sizes.kernel))
        self.A_log = _empty(config, divide(sizes.n_value_heads, tp))
        self.dt_bias = _empty(config, divide(sizes.n_value_heads, tp))
        for parameter in (self.conv1d.weight, self.A_log, self.dt_bias):
            # Every rank has other heads, so each counts in the gradient norm.
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        self.norm = _Weight(_empty(config, sizes.value_dim))
        # Every rank has it whole, and sees its own heads alone.
        self.norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.linear_proj = RowParallelLinear(
            sizes.value_width, config.hidden_size, input_is_parallel=True, skip_bias_add=True, **options
        )

    def forward(
        self, hidden_states: torch.Tensor, *, packed_seq_params: PackedSequences, **_unused: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        projected, _ = self.in_proj(hidden_states)
        mix = partial(self._mix, spans=packed_seq_params.attention.spans)
        if self.recomputes and torch.is_grad_enabled():
            output = tensor_parallel.checkpoint(mix, False, projected)
        else:
            output = mix(projected)
        return self.linear_proj(output)

    def _mix(self, projected: torch.Tensor, *, spans: tuple[int, ...]) -> torch.Tensor:
        weights = DeltaWeights(self.conv1d.weight, self.A_log, self.dt_bias, self.norm.weight)
        return mix_tokens(projected.squeeze(1), weights, self.sizes, spans, self.eps, self.cp_group).unsqueeze(1)


class _Weight(nn.Module):
    """A module whose only parameter is called `weight`, as in Hugging Face's files."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def _empty(config: TransformerConfig, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=config.params_dtype, device=torch.cuda.current_device()))
