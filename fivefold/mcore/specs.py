"""The layers of a decoder, as Megatron-Core specs over stock PyTorch kernels, or over TransformerEngine's modules."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
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
from packaging.specifiers import SpecifierSet
from torch import nn

from fivefold.config.schema.megatron import Kernels
from fivefold.families.shape import LatentAttention
from fivefold.mcore.attention import PackedCoreAttention, PackedSelfAttention
from fivefold.mcore.experts import GroupedExperts
from fivefold.mcore.latent_attention import LatentSelfAttention
from fivefold.mcore.router import Router

TE_VERSIONS = SpecifierSet(">=2.11,<2.12")
"""Versions of TransformerEngine whose functions `te_layers` calls; Megatron-Core 0.16.1 asks for less than 2.12."""


def check_transformer_engine(kernels: Kernels) -> None:
    """Refuse TransformerEngine's modules where they cannot be built.

    Raises:
        ValueError: `kernels` is te, and there is no GPU, or no TransformerEngine of a version that fits.
    """
    if kernels != "te":
        return
    if not torch.cuda.is_available():
        raise ValueError("kernels=te has kernels for NVIDIA GPUs, and there is none here: set kernels to fivefold")
    advice = "pip install --no-build-isolation 'transformer-engine[pytorch,core_cu13]==2.11.0' (core_cu12 for CUDA 12)"
    try:
        found = version("transformer-engine")
    except PackageNotFoundError:
        raise ValueError(
            f"kernels=te builds layers of TransformerEngine, which is not installed here: run {advice}, or set kernels "
            "to fivefold, which does not need it"
        ) from None
    if found not in TE_VERSIONS:
        raise ValueError(
            f"kernels=te needs TransformerEngine {TE_VERSIONS}, and {found} is installed: run {advice}, or set kernels "
            "to fivefold"
        )


def spec_provider(kernels: Kernels) -> BackendSpecProvider:
    """Return the modules that a recipe's `megatron.kernels` stands for."""
    if kernels == "fivefold":
        return TorchSpecProvider()
    # Imported here, because it needs TransformerEngine.
    from fivefold.mcore.te_layers import TESpecs

    return TESpecs()


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
    config: TransformerConfig, vp_stage: int | None, latent: LatentAttention | None, provider: BackendSpecProvider
) -> TransformerBlockSubmodules:
    """Return the specs of the layers of this pipeline and virtual stage.

    Args:
        config: the configuration of the model, whose `moe_layer_freq` says which layers have experts.
        vp_stage: index of the virtual stage; None without virtual stages.
        latent: sizes of multi-head latent attention, which only PyTorch's kernels compute; None for grouped-query
            attention.
        provider: the modules of layers.
    """
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    moe = config.moe_layer_freq if config.num_moe_experts else [0] * config.num_layers
    attention = _attention_spec(config, provider) if latent is None else _latent_attention_spec(latent)
    layers = [
        _layer_spec(config, attention, provider, is_moe=bool(moe[index])) for index in range(first, first + count)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=provider.layer_norm(rms_norm=True))


def _attention_spec(config: TransformerConfig, provider: BackendSpecProvider) -> ModuleSpec:
    head_norm = provider.layer_norm(rms_norm=True, for_qk=True) if config.qk_layernorm else IdentityOp
    fused = provider.column_parallel_layer_norm_linear() if provider.fuse_layernorm_and_linear() else None
    return ModuleSpec(
        module=PackedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=fused or provider.column_parallel_linear(),
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _latent_attention_spec(latent: LatentAttention) -> ModuleSpec:
    return ModuleSpec(module=LatentSelfAttention, params={"latent": latent, "norm": RMSNorm})


def _layer_spec(
    config: TransformerConfig, attention: ModuleSpec, provider: BackendSpecProvider, *, is_moe: bool
) -> ModuleSpec:
    mlp = get_mlp_module_spec_for_backend(
        backend=provider, num_experts=config.num_moe_experts if is_moe else None, moe_grouped_gemm=True
    )
    if is_moe:
        mlp.submodules.router = Router
    norm, is_fused = provider.layer_norm(rms_norm=True), provider.fuse_layernorm_and_linear()
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp if is_fused else norm,
            self_attention=attention,
            self_attn_bda=add_residual,
            # Routers and shared experts read its output too.
            pre_mlp_layernorm=IdentityOp if is_fused and not is_moe else norm,
            mlp=mlp,
            mlp_bda=add_residual,
        ),
    )
