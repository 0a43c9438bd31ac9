"""The layers of a decoder, as Megatron-Core specs over stock PyTorch kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import nn

from fivefold.families.shape import LatentAttention
from fivefold.mcore.attention import PackedCoreAttention, PackedSelfAttention
from fivefold.mcore.experts import GroupedExperts
from fivefold.mcore.latent_attention import LatentSelfAttention
from fivefold.mcore.router import Router


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich 2019), whose gradient Megatron-Core sums over sequence-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_unused: Any) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class TorchSpecProvider(BackendSpecProvider):
    """Stock PyTorch kernels inside Megatron-Core's parallel modules."""

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return False

    def column_parallel_layer_norm_linear(self) -> None:
        return None

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return PackedCoreAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool) -> tuple[type, None]:
        return GroupedExperts, None

    def activation_func(self) -> None:
        return None


def add_residual(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
    """Return a residual connection with dropout in Megatron-Core's calling convention; rate 0 launches no kernel."""

    def add(
        output_and_bias: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, rate: float
    ) -> torch.Tensor:
        output, bias = output_and_bias
        if bias is not None:
            output = output + bias
        return residual + (F.dropout(output, rate, training) if rate > 0 else output)

    return add


def block_spec(
    config: TransformerConfig, vp_stage: int | None, latent: LatentAttention | None
) -> TransformerBlockSubmodules:
    """Return the specs of the layers of this pipeline and virtual stage.

    Args:
        config: the configuration of the model, whose `moe_layer_freq` says which layers have experts.
        vp_stage: index of the virtual stage; None without virtual stages.
        latent: sizes of multi-head latent attention; None for grouped-query attention.
    """
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    moe = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    attention = _attention_spec(config) if latent is None else _latent_attention_spec(latent)
    layers = [_layer_spec(config, attention, is_moe=bool(moe[index])) for index in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def _attention_spec(config: TransformerConfig) -> ModuleSpec:
    head_norm = RMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=PackedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=PackedCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _latent_attention_spec(latent: LatentAttention) -> ModuleSpec:
    return ModuleSpec(module=LatentSelfAttention, params={"latent": latent, "norm": RMSNorm})


def _layer_spec(config: TransformerConfig, attention: ModuleSpec, *, is_moe: bool) -> ModuleSpec:
    mlp = get_mlp_module_spec_for_backend(
        backend=TorchSpecProvider(), num_experts=config.num_moe_experts if is_moe else None, moe_grouped_gemm=True
    )
    if is_moe:
        mlp.submodules.router = Router
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=add_residual,
            pre_mlp_layernorm=RMSNorm,
            mlp=mlp,
            mlp_bda=add_residual,
        ),
    )
