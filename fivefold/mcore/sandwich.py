"""A layer with norms on the outputs of attention and MLP, before they are added to the residual stream."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from fivefold.mcore.layers import RMSNorm


class SandwichLayer(TransformerLayer):
    """Such a layer; Megatron-Core calls its two modules, whose outputs are then normalised."""

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        self.post_self_attn_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.self_attention.register_forward_hook(partial(_normalised, self.post_self_attn_layernorm))
        self.mlp.register_forward_hook(partial(_normalised, self.post_mlp_layernorm))


def _normalised(
    norm: RMSNorm, _module: nn.Module, _args: Any, output: tuple[torch.Tensor, torch.Tensor | None]
) -> tuple[torch.Tensor, None]:
    hidden, bias = output
    normalised: torch.Tensor = norm(hidden if bias is None else hidden + bias)
    return normalised, None
