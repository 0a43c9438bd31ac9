"""The layers of a decoder as Megatron-Core specs, over stock PyTorch kernels or TransformerEngine's; its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import nn

from fivefold.bridge.mapping import padded_vocab
from fivefold.config.schema.megatron import Kernels
from fivefold.families.shape import LayerKind, ModelShape
from fivefold.layout.parallel import ParallelLayout
from fivefold.mcore import releases
from fivefold.mcore.auxiliary_losses import BalancedRouter, has_auxiliary_losses
from fivefold.mcore.choice import BestGroups, Choice
from fivefold.mcore.delta_net import GatedDeltaNet
from fivefold.mcore.dispatcher import ExchangingDispatcher, SortingDispatcher
from fivefold.mcore.latent_attention import LatentSelfAttention
from fivefold.mcore.layers import (
    BiasedRowParallelLinear,
    GroupedExperts,
    PackedCoreAttention,
    PackedSelfAttention,
    RMSNorm,
    add_residual,
)
from fivefold.mcore.model import Decoder, ValueLayer
from fivefold.mcore.router import Router, routers_of
from fivefold.mcore.wide_norms import WideNormAttention


def spec_provider(kernels: Kernels) -> BackendSpecProvider:
    """Return the modules that a recipe's `megatron.kernels` stands for."""
    if kernels == "fivefold":
        return TorchSpecProvider()
    # Imported here, because it needs TransformerEngine.
    from fivefold.mcore.te_layers import TESpecs

    return TESpecs()


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

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return RMSNorm

    def core_attention(self) -> type:
        return PackedCoreAttention

    def grouped_mlp_modules(self, *_: bool) -> Any:
        return releases.experts(GroupedExperts)

    def activation_func(self) -> None:
        return None


def block_spec(
    config: TransformerConfig, vp_stage: int | None, shape: ModelShape, provider: BackendSpecProvider
) -> TransformerBlockSubmodules:
    """Return the specs of the layers of this pipeline and virtual stage.

    Args:
        config: the configuration of the model.
        vp_stage: index of the virtual stage; None without virtual stages.
        shape: the shape of the model, which says how each layer mixes tokens, and which layers have experts.
        provider: the modules of layers.
    """
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    mixers = {kind: _mixer_spec(kind, config, shape, provider) for kind in set(shape.layer_kinds)}
    layers = [
        _layer_spec(config, mixers[shape.layer_kinds[index]], shape, provider, is_moe=shape.moe_layers[index])
        for index in range(first, first + count)
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=provider.layer_norm(rms_norm=True))


def _mixer_spec(
    kind: LayerKind, config: TransformerConfig, shape: ModelShape, provider: BackendSpecProvider
) -> ModuleSpec:
    """Return the spec of what mixes tokens; only PyTorch's kernels compute latent attention and gated delta nets."""
    match kind:
        case "full" | "window":
            return _attention_spec(config, shape, provider, window=shape.window if kind == "window" else None)
        case "latent":
            return ModuleSpec(module=LatentSelfAttention, params={"latent": shape.latent, "norm": RMSNorm})
        case "delta":
            return ModuleSpec(module=GatedDeltaNet, params={"sizes": shape.delta})


def _attention_spec(
    config: TransformerConfig, shape: ModelShape, provider: BackendSpecProvider, window: int | None
) -> ModuleSpec:
    head_norm = provider.layer_norm(rms_norm=True, for_qk=True) if config.qk_layernorm else IdentityOp
    fused = provider.column_parallel_layer_norm_linear() if provider.fuse_layernorm_and_linear() else None
    return ModuleSpec(
        module=WideNormAttention if shape.wide_qk_norm else PackedSelfAttention,
        params={
            "attn_mask_type": AttnMaskType.causal,
            "is_local": window is not None and shape.local_rope_theta is not None,
        },
        submodules=SelfAttentionSubmodules(
            linear_qkv=fused or provider.column_parallel_linear(),
            core_attention=(
                partial(PackedCoreAttention, window=window, has_sinks=shape.sinks)
                if window is not None or shape.sinks or shape.score_scale is not None
                else provider.core_attention()
            ),
            linear_proj=BiasedRowParallelLinear if shape.output_bias else provider.row_parallel_linear(),
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _layer_spec(
    config: TransformerConfig, attention: ModuleSpec, shape: ModelShape, provider: BackendSpecProvider, *, is_moe: bool
) -> ModuleSpec:
    mlp = get_mlp_module_spec_for_backend(
        backend=provider, num_experts=config.num_moe_experts if is_moe else None, moe_grouped_gemm=True
    )
    if is_moe:
        releases.submodules(mlp).router = BalancedRouter if has_auxiliary_losses(config) else Router
        if shape.expert_clamp is not None:
            # Here and below, modules are imported for the few families that have such layers.
            from fivefold.mcore.clamped_experts import ClampedExperts

            releases.submodules(mlp).experts = ClampedExperts
    layer: type = TransformerLayer
    if shape.sandwich_norms:
        from fivefold.mcore.sandwich import SandwichLayer

        layer = SandwichLayer
    norm, is_fused = provider.layer_norm(rms_norm=True), provider.fuse_layernorm_and_linear()
    return ModuleSpec(
        module=layer,
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


def build_chunks(
    config: TransformerConfig,
    layout: ParallelLayout,
    shape: ModelShape,
    provider: BackendSpecProvider,
    *,
    replays: bool = False,
) -> list[Decoder]:
    """Build this rank's model chunks on the device, one for each virtual stage, with uninitialised weights.

    Routes are recorded and replayed if it `replays`.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks = []
    for stage in range(layout.vpp):
        vp_stage = stage if layout.vpp > 1 else None
        chunk = Decoder(
            config,
            block_spec(config, vp_stage, shape, provider),
            vocab=padded_vocab(shape.vocab, layout.tp),
            is_first=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            is_last=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            is_tied=shape.tied_embeddings,
            groups=groups,
            vp_stage=vp_stage,
        )
        if shape.value_head and chunk.post_process:
            chunk.output_layer = ValueLayer(shape.hidden, config.params_dtype, has_bias=shape.value_bias)
        if shape.scaled_embedding:
            from fivefold.engine.embedding import embedding_scale

            chunk.embedding_scale = embedding_scale(shape.hidden, config.params_dtype)
        chunk.routers = routers_of([chunk])
        if shape.router_shift:
            for router in chunk.routers:
                router.add_bias()
        _install_dispatchers(chunk, config, groups)
        chunks.append(chunk.to(torch.cuda.current_device()))
    _install_choices(routers_of(chunks), config, shape, replays=replays)
    return chunks


def _install_choices(routers: Sequence[Router], config: TransformerConfig, shape: ModelShape, *, replays: bool) -> None:
    """Give routers a `Choice` where it is not Megatron-Core's: of groups of experts, and where routes are replayed."""
    limits = (config.moe_router_num_groups, config.moe_router_group_topk)
    has_groups = limits == (shape.expert_groups, shape.groups_per_token)
    if has_groups or replays:
        for row, router in enumerate(routers):
            best = BestGroups(shape.group_best) if has_groups else None
            router.router_replay = router.choice = Choice(best, row if replays else None)


def _install_dispatchers(decoder: nn.Module, config: TransformerConfig, groups: ProcessGroupCollection) -> None:
    """Give every MoE layer a dispatcher of Fivefold's, unless the recipe chooses another one."""
    if config.moe_token_dispatcher_type != "alltoall":
        return
    for module in decoder.modules():
        if isinstance(module, MoELayer):
            kind = SortingDispatcher if groups.ep.size() == 1 else ExchangingDispatcher
            module.token_dispatcher = kind(module.num_local_experts, config, groups)
            if config.moe_shared_expert_overlap and module.use_shared_expert:
                module.token_dispatcher.set_shared_experts(module.shared_experts)
