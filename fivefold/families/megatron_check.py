"""Checks of a role's section `megatron` against its model and its layout."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.config.schema.engine import EngineConfig
from fivefold.config.schema.megatron import RecomputeModule
from fivefold.families.shape import ModelShape
from fivefold.layout.allocation import RoleAllocation
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.stages import chunk_sizes


def check_megatron(config: EngineConfig, shape: ModelShape, layout: ParallelLayout) -> None:
    """Refuse options of Megatron-Core that the model or the pipeline cannot take.

    Raises:
        ValueError: a line for each problem.
    """
    if problems := list(megatron_problems("actor", config, shape, layout)):
        raise ValueError("\n".join(problems))


def megatron_problems(
    role: str, config: EngineConfig, shape: ModelShape, layout: ParallelLayout | RoleAllocation
) -> Iterator[str]:
    """Yield a line for each key of a role's section `megatron` that its model or its pipeline cannot take."""
    prefix = f"{role}.megatron.transformer"
    yield from _bridge_problems(role, config, shape, layout.tp)
    yield from _kernel_problems(role, config, shape, layout.cp)
    yield from _router_problems(prefix, config, shape)
    if config.megatron.transformer.moe_shared_expert_overlap:
        yield from _overlap_problems(f"{prefix}.moe_shared_expert_overlap=true", config, shape, layout)
    yield from _recompute_problems(prefix, config, shape)
    yield from _recomputed_layers_problems(prefix, config, shape, layout)
    yield from _schedule_problems(prefix, config, layout.pp, layout.vpp)


def _bridge_problems(role: str, config: EngineConfig, shape: ModelShape, tp: int) -> Iterator[str]:
    """Yield a line for each thing that a bridge of another package cannot do."""
    bridge, key = config.megatron.bridge_type, f"{role}.megatron.bridge_type={config.megatron.bridge_type}"
    if bridge == "fivefold":
        return
    if role == "critic":
        yield f"{key} has no value heads: set it to fivefold"
    if shape.latent is not None:
        yield f"{key} has no latent attention, which {shape.family} needs: set it to fivefold"
    if bridge == "megatron-bridge" and shape.vocab % tp:
        yield f"{key} does not pad the vocabulary, and t{tp} does not divide {shape.vocab} tokens: set it to fivefold"


def _kernel_problems(role: str, config: EngineConfig, shape: ModelShape, cp: int) -> Iterator[str]:
    """Yield a line for each thing that layers of TransformerEngine's modules cannot do."""
    if config.megatron.kernels != "te":
        return
    key = f"{role}.megatron.kernels=te"
    if shape.latent is not None:
        yield f"{key} has no latent attention, which {shape.family} needs: set it to fivefold"
    if cp > 1:
        yield f"{key} does not divide sequences as c{cp} does: set it to fivefold, or drop c{cp} from backend"


def _overlap_problems(
    key: str, config: EngineConfig, shape: ModelShape, layout: ParallelLayout | RoleAllocation
) -> Iterator[str]:
    if not shape.shared_expert_ffn_hidden:
        yield f"{key} is about shared experts, and {shape.family} has none: drop it"
    elif layout.ep == layout.etp == 1:
        yield f"{key} computes while tokens travel, and all experts of a layer are on one rank: drop it, or write e2"
    if "shared_experts" in config.megatron.recompute_modules(is_moe=shape.is_moe):
        yield f"{key} does not work with shared_experts in recompute_modules: drop one of them"


def _router_problems(prefix: str, config: EngineConfig, shape: ModelShape) -> Iterator[str]:
    fields = config.megatron.transformer
    if (rate := fields.moe_router_bias_update_rate) and not shape.router_bias:
        yield (
            f"{prefix}.moe_router_bias_update_rate={rate} changes the offsets of a router's scores, and routers of "
            f"{shape.family} have none: drop it"
        )
    if shape.is_moe:
        groups, chosen = fields.moe_router_num_groups, fields.moe_router_group_topk
        if groups and chosen and (shape.n_experts % groups or chosen > groups or shape.top_k % chosen):
            yield (
                f"{prefix}.moe_router_num_groups={groups} must divide the {shape.n_experts} experts, and "
                f"moe_router_group_topk={chosen} must be at most that and divide the {shape.top_k} experts of a token"
            )
        return
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        if value := getattr(fields, name):
            yield f"{prefix}.{name}={value} is a router's loss, and {shape.family} has none: drop it"
    if fields.moe_router_num_groups:
        yield f"{prefix}.moe_router_num_groups={fields.moe_router_num_groups} is about experts: drop it"
    for name in ("moe_layer_recompute", "moe_router_force_load_balancing"):
        if getattr(fields, name):
            yield f"{prefix}.{name}=true is about experts, and {shape.family} has none: drop it"


def _recompute_problems(prefix: str, config: EngineConfig, shape: ModelShape) -> Iterator[str]:
    has: dict[RecomputeModule, bool] = {
        "moe": shape.is_moe,
        "moe_act": shape.is_moe,
        "shared_experts": shape.shared_expert_ffn_hidden > 0,
        "mlp": not all(shape.moe_layers),
    }
    for module in config.megatron.transformer.recompute_modules or ():
        if not has.get(module, True):
            yield f"{prefix}.recompute_modules has {module}, and {shape.family} has no such module: drop it"
    chosen = config.megatron.recompute_modules(is_moe=shape.is_moe)
    for inner in ("moe_act", "shared_experts"):
        if "moe" in chosen and inner in chosen:
            yield f"{prefix}.recompute_modules has {inner} and moe, of which {inner} is a part: drop {inner}"


def _recomputed_layers_problems(
    prefix: str, config: EngineConfig, shape: ModelShape, layout: ParallelLayout | RoleAllocation
) -> Iterator[str]:
    fields, count = config.megatron.transformer, config.megatron.transformer.recompute_num_layers
    if count is None or fields.recompute_method == "block":
        return
    try:
        sizes = chunk_sizes(shape.n_layers, layout.pp, layout.vpp, layout.split)
    except ValueError:  # a problem of the layout, which is told there
        return
    if uneven := sorted({size for size in sizes if size % count}):
        yield (
            f"{prefix}.recompute_num_layers={count} does not divide the {' and '.join(map(str, uneven))} layers of a "
            "(virtual) stage: choose a divisor, or recompute_method=block"
        )


def _schedule_problems(prefix: str, config: EngineConfig, pp: int, vpp: int) -> Iterator[str]:
    fields = config.megatron.transformer
    group = fields.microbatch_group_size_per_vp_stage
    if group is not None and (vpp == 1 or group % pp):
        rule = "the layout has no virtual stages: drop it" if vpp == 1 else f"must be a multiple of the {pp} stages"
        yield f"{prefix}.microbatch_group_size_per_vp_stage={group}: {rule}"
