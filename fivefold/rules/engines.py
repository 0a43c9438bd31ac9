"""Rules of the engines: what Megatron-Core and FSDP cannot do with a role's section, its model or its layout."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from fivefold.config.roles import ROLES, roles_of
from fivefold.config.schema.engine import EngineConfig
from fivefold.config.schema.fsdp import FSDPConfig
from fivefold.config.schema.megatron import RecomputeModule
from fivefold.config.schema.recipe import Recipe
from fivefold.families.shape import ModelShape
from fivefold.layout.allocation import RoleAllocation
from fivefold.layout.backends import BACKENDS
from fivefold.layout.parallel import ParallelLayout
from fivefold.layout.recipe import recipe_allocation
from fivefold.layout.stages import chunk_sizes
from fivefold.rules.models import RoleShapes, part_problems

_SECTIONS = ("megatron", "fsdp")
"""Sections of a role that only the engine of this name reads."""
_FLASH_ATTENTION_4_HEADS = ((64, 64), (128, 128), (192, 128))
"""Widths of query and value heads for which FlashAttention 4 was compared with a softmax in double precision. Its
kernels for a Hopper GPU take more, and compute wrong gradients for some: 80."""


def engine_problems(recipe: Recipe, shape: ModelShape, others: RoleShapes) -> Iterator[str]:
    """Yield a line for each key of a role's section that its engine, its model or its devices cannot take."""
    for allocation in recipe_allocation(recipe).roles:
        role, section = ROLES[allocation.role], roles_of(recipe)[allocation.role].section
        if not isinstance(section, EngineConfig):
            if allocation.backend == "fsdp":  # a reference has the actor's options
                yield from (f"{role.name}: {line}" for line in fsdp_problems("actor", recipe.actor.fsdp, allocation))
            continue
        model = others.get(role.name, shape)
        if recipe.cluster.n_gpus_per_node == 0:
            yield from _without_gpus(role.key, section)
        yield from _of_other_engines(role.name, role.key, section, allocation.backend)
        yield from attention_problems(role.key, section, model)
        if allocation.backend == "megatron":
            yield from megatron_problems(role.key, section, model, allocation)
        elif allocation.backend == "fsdp":
            yield from fsdp_problems(role.key, section.fsdp, allocation)


def _without_gpus(key: str, section: EngineConfig) -> Iterator[str]:
    """Yield a line for each choice of kernels that needs a GPU."""
    if section.attn_impl == "flash_attention_4":
        yield (
            f"{key}.attn_impl=flash_attention_4 runs on GPUs, and cluster.n_gpus_per_node is 0: set attn_impl to "
            "flash_attention_2, or name the GPUs"
        )
    if section.megatron.kernels == "te":
        yield (
            f"{key}.megatron.kernels=te runs on GPUs, and cluster.n_gpus_per_node is 0: set it to fivefold, or name "
            "the GPUs"
        )


def _of_other_engines(role: str, key: str, section: EngineConfig, backend: str) -> Iterator[str]:
    """Yield a line for each key that another engine than the role's reads."""
    for name in _SECTIONS:
        if name == backend:
            continue
        for inner, value in _changed(getattr(section, name)):
            own = getattr(section, backend)
            fix = f"set {key}.{backend}.{inner} in its place" if _has_key(own, inner) else "drop it"
            yield (
                f"{key}.{name}.{inner}={value} is for {BACKENDS[name].title}, and the {role} runs on "
                f"{BACKENDS[backend].title}: {fix}"
            )


def _has_key(section: BaseModel, key: str) -> bool:
    """Return whether a section has a dotted key."""
    name, _, rest = key.partition(".")
    return name in type(section).model_fields and (not rest or _has_key(getattr(section, name), rest))


def _changed(section: BaseModel) -> Iterator[tuple[str, object]]:
    """Yield the dotted key and the value of each field that differs from its default."""
    for name, value in section:
        if isinstance(value, BaseModel):
            yield from ((f"{name}.{key}", inner) for key, inner in _changed(value))
        elif value != type(section).model_fields[name].default:
            yield name, value


def attention_problems(role: str, config: EngineConfig, shape: ModelShape) -> Iterator[str]:
    """Yield a line if the model of a role cannot have the kernels of attention that its section asks for."""
    if config.attn_impl == "flash_attention_4" and (shape.window is not None or shape.sinks):
        yield (
            f"{role}.attn_impl=flash_attention_4 has not been tried with the sliding windows and attention sinks of "
            f"{shape.family}: set it to flash_attention_2"
        )
    elif config.attn_impl == "flash_attention_4" and shape.head_widths not in _FLASH_ATTENTION_4_HEADS:
        query, value = shape.head_widths
        proven = ", ".join(f"{query}/{value}" for query, value in _FLASH_ATTENTION_4_HEADS)
        yield (
            f"{role}.attn_impl=flash_attention_4 has been proven right for query and value heads of {proven} channels, "
            f"got {query}/{value}: set it to flash_attention_2"
        )


def megatron_problems(
    role: str, config: EngineConfig, shape: ModelShape, layout: ParallelLayout | RoleAllocation
) -> Iterator[str]:
    """Yield a line for each key of a role's section `megatron` that its model or its pipeline cannot take."""
    prefix = f"{role}.megatron.transformer"
    yield from part_problems(f"{role}.megatron", config.megatron, shape)
    yield from _bridge_problems(role, config, shape, layout.tp)
    yield from _kernel_problems(role, config, shape, layout.cp)
    yield from _router_problems(prefix, config, shape)
    if config.megatron.transformer.bias_activation_fusion and shape.activation != "silu":
        yield (
            f"{prefix}.bias_activation_fusion=true fuses SwiGLU, and the MLPs of {shape.family} are gated by GELU: set "
            "it to false"
        )
    if config.megatron.optimizer.apply_wd_to_qk_layernorm and shape.latent is not None:
        yield (
            f"{role}.megatron.optimizer.apply_wd_to_qk_layernorm=true has no query and key norms to decay in "
            f"{shape.family}, whose norms are those before the latent projections: set it to false"
        )
    if shape.is_moe and shape.top_k == 1 and shape.norm_topk_prob:
        yield (
            f"{role}: a token of {shape.family} has one expert, whose weight is scaled to 1; Megatron-Core does not "
            f"scale the weight of one expert: set {role}.backend=fsdp:d1"
        )
    if config.megatron.transformer.moe_shared_expert_overlap and shape.shared_expert_ffn_hidden:
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
    yield from _missing_layers(key, shape)
    if bridge == "megatron-bridge" and shape.vocab % tp:
        yield f"{key} does not pad the vocabulary, and t{tp} does not divide {shape.vocab} tokens: set it to fivefold"


def _missing_layers(key: str, shape: ModelShape) -> Iterator[str]:
    """Yield a line for each kind of layer of the model that only Fivefold's own layers are."""
    names = {"latent": "latent attention", "delta": "gated delta nets", "window": "sliding windows"}
    for kind in sorted(set(shape.layer_kinds) & names.keys()):
        yield f"{key} has no {names[kind]}, which {shape.family} needs: set it to fivefold"
    if shape.wide_qk_norm:
        yield f"{key} has no norms over all heads, which {shape.family} needs: set it to fivefold"
    if shape.sinks:
        yield f"{key} has no attention sinks, which {shape.family} needs: set it to fivefold"


def _kernel_problems(role: str, config: EngineConfig, shape: ModelShape, cp: int) -> Iterator[str]:
    """Yield a line for each thing that layers of TransformerEngine's modules cannot do."""
    if config.megatron.kernels != "te":
        return
    key = f"{role}.megatron.kernels=te"
    yield from _missing_layers(key, shape)
    if cp > 1:
        yield f"{key} does not divide sequences as c{cp} does: set it to fivefold, or drop c{cp} from backend"


def _overlap_problems(
    key: str, config: EngineConfig, shape: ModelShape, layout: ParallelLayout | RoleAllocation
) -> Iterator[str]:
    if layout.ep == layout.etp == 1:
        yield f"{key} computes while tokens travel, and all experts of a layer are on one rank: drop it, or write e2"
    if "shared_experts" in config.megatron.recompute_modules(is_moe=shape.is_moe):
        yield f"{key} does not work with shared_experts in recompute_modules: drop one of them"


def _router_problems(prefix: str, config: EngineConfig, shape: ModelShape) -> Iterator[str]:
    fields = config.megatron.transformer
    groups, chosen = fields.moe_router_num_groups, fields.moe_router_group_topk
    if not (shape.is_moe and groups and chosen):
        return
    if shape.n_experts % groups or chosen > groups or shape.top_k % chosen:
        yield (
            f"{prefix}.moe_router_num_groups={groups} must divide the {shape.n_experts} experts, and "
            f"moe_router_group_topk={chosen} must be at most that and divide the {shape.top_k} experts of a token"
        )


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
            yield f"{prefix}.recompute_modules has {inner} and moe, and {inner} is a part of moe: drop {inner}"


def _recomputed_layers_problems(
    prefix: str, config: EngineConfig, shape: ModelShape, layout: ParallelLayout | RoleAllocation
) -> Iterator[str]:
    fields, count = config.megatron.transformer, config.megatron.transformer.recompute_num_layers
    if count is None or fields.recompute_method == "block":
        return
    try:
        sizes = chunk_sizes(shape.n_layers, layout.pp, layout.vpp, layout.split)
    except ValueError:  # a problem of the layout, which its own rule reports
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


def fsdp_problems(role: str, config: FSDPConfig, layout: ParallelLayout | RoleAllocation) -> Iterator[str]:
    """Yield a line for each key of a role's section `fsdp` that its layout cannot take."""
    kept = config.reshard_after_forward
    if isinstance(kept, bool) or layout.dp is None:
        return
    ranks = layout.dp * layout.cp
    if kept >= ranks or ranks % kept:
        yield (
            f"{role}.fsdp.reshard_after_forward={kept} must be smaller than the {ranks} ranks over which weights are "
            "sharded (d x c), and divide them: choose a divisor, or true or false"
        )
