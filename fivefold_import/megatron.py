"""Options of Megatron-Core, which several frameworks hand on under Megatron-Core's own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from fivefold.config.library_names import REFUSED
from fivefold.config.schema.megatron import (
    Balancing,
    MegatronDDPFields,
    MegatronFields,
    MegatronTransformerFields,
    RecomputeModule,
)
from fivefold.families.megatron_settings import HANDED_ON
from fivefold_import import reasons
from fivefold_import.defaults import UNKNOWN
from fivefold_import.draft import Degree, Draft, Role, Rule
from fivefold_import.models import is_moe
from fivefold_import.rules import Mapped, implied, off, only, to, unknown, unsupported
from fivefold_import.values import DTYPE, Convert, Unfit, flag, number, one_of, positive

DEGREES: Mapping[str, Degree] = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
FOLLOWS_SCHEDULE = "this follows from the pipeline's schedule"
DROPLESS = "no token is ever dropped"
ALL_TO_ALL = "DeepEP is chosen by actor.megatron.token_dispatcher=flex"
AS_ACTOR = "the reference runs with the actor's options"
CHECKPOINT = "recomputation is switched by actor.megatron.recompute: none, selective or full"
SHARED_OUT = "sequence parallelism, which is on if t is above 1, divides saved activations over the ranks"


def _modules(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise Unfit(f"{value!r} is not a list of modules")
    return [_MODULE(module) for module in value]


_MODULE = one_of(**{name: name for name in get_args(RecomputeModule)})
RECOMPUTED: Mapping[str, tuple[str, Any, Convert]] = {
    "recompute_method": ("full", "uniform", one_of(uniform="uniform", block="block")),
    "recompute_num_layers": ("full", 1, positive),
    "recompute_modules": ("selective", None, _modules),
}
"""What says how much is recomputed: (the granularity that reads it, its default, its conversion)."""
STAGES = frozenset(
    {
        "account_for_embedding_in_pipeline_split",
        "account_for_loss_in_pipeline_split",
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
    }
)
"""Keys of the recipe about the layers of each pipeline stage."""
DISTRIBUTED_OPTIMIZER = "the optimizer is always distributed"
GROUPED_EXPERTS = "experts are always computed as one grouped multiplication"


@dataclass(frozen=True)
class RouterLoss(Mapped):
    """Maps the weight of the router's auxiliary loss, which has no effect without load balancing."""

    def __call__(self, draft: Draft, source: str) -> None:
        section, _, _ = source.rpartition(".")
        balancing = f"{section}.moe_router_load_balancing_type"
        if draft.get(balancing) == "none":
            draft.implied(source, f"{balancing} is none, so that there is no auxiliary loss")
        super().__call__(draft, source)


def _weights(value: Any) -> float | list[float]:
    return [number(one) for one in value] if isinstance(value, list) else number(value)


def _balancing(value: Any) -> Any:
    return [_BALANCING(one) for one in value] if isinstance(value, list) else _BALANCING(value)


_BALANCING = one_of(**{name: name for name in get_args(Balancing)})


def _by_name(section: type[MegatronFields], name: str) -> dict[str, Rule]:
    """Return rules for the fields of a section that map to themselves, and for those that no recipe can set."""
    handed_on = HANDED_ON[section.owner] | (STAGES if section is MegatronTransformerFields else frozenset())
    refused = {field: off(reason) for field, reason in REFUSED[section.owner].items()}
    return {**refused, **{field: _handed_on(f"actor.megatron.{name}.{field}") for field in sorted(handed_on)}}


def _handed_on(key: str) -> Rule:
    """Map a field of Megatron-Core to the recipe's key of its name, whose own rules tell what the value must be."""

    def rule(draft: Draft, source: str) -> None:
        if (value := draft.get(source)) is None:
            draft.implied(source, "it is not set")
        else:
            draft.mapped(source, key, value)

    return rule


def _offsets_rate(draft: Draft, source: str) -> None:
    """Map the step of the routers' offsets, which only routers that have them read."""
    if draft.get(source.rpartition(".")[0] + ".moe_router_enable_expert_bias"):
        draft.mapped(source, "actor.megatron.transformer.moe_router_bias_update_rate", number(draft.get(source)))
    draft.implied(source, "only routers with offsets read this (moe_router_enable_expert_bias)")


def _balance(draft: Draft, source: str) -> None:
    """Map the kind of the load-balancing loss; without a loss, its weight stays 0."""
    if (kind := _balancing(draft.get(source))) in ("aux_loss", "none"):
        draft.implied(source, "moe_aux_loss_coeff is the weight of the auxiliary loss")
    else:
        draft.mapped(source, "actor.megatron.transformer.moe_router_load_balancing_type", kind)


TRANSFORMER: Mapping[str, Rule] = {
    **_by_name(MegatronTransformerFields, "transformer"),
    # Mixture of experts
    "moe_router_dtype": to("actor.megatron.router_dtype", one_of(fp32="fp32", float32="fp32")),
    "moe_token_dispatcher_type": to(
        "actor.megatron.token_dispatcher", one_of(alltoall="alltoall", allgather="allgather", flex="flex")
    ),
    "moe_aux_loss_coeff": RouterLoss("actor.megatron.transformer.moe_aux_loss_coeff", _weights),
    "moe_z_loss_coeff": to("actor.megatron.transformer.moe_z_loss_coeff", number),
    "moe_router_load_balancing_type": _balance,
    "moe_router_num_groups": _handed_on("actor.megatron.transformer.moe_router_num_groups"),
    "moe_router_group_topk": _handed_on("actor.megatron.transformer.moe_router_group_topk"),
    "moe_router_enable_expert_bias": implied("the model's config.json says whether its routers have offsets"),
    "moe_router_bias_update_rate": _offsets_rate,
    "moe_grouped_gemm": only(True, holds=GROUPED_EXPERTS),
    "moe_permute_fusion": implied(reasons.KERNELS),
    "moe_enable_deepep": off(ALL_TO_ALL),
    "moe_expert_capacity_factor": unsupported(DROPLESS),
    "moe_pad_expert_input_to_capacity": off(DROPLESS),
    "moe_token_drop_policy": implied(DROPLESS),
    "moe_enable_routing_replay": off(reasons.NO_ROUTER_REPLAY),
    # Recomputation
    "recompute_granularity": implied(reasons.ONLY_TRAINING_RECOMPUTES),
    "moe_layer_recompute": implied(reasons.ONLY_TRAINING_RECOMPUTES),
    **dict.fromkeys(RECOMPUTED, implied(reasons.ONLY_TRAINING_RECOMPUTES)),
    "distribute_saved_activations": off(SHARED_OUT),
    # Parallelism
    "sequence_parallel": implied("sequence parallelism is on if t is above 1"),
    "use_distributed_optimizer": only(True, holds=DISTRIBUTED_OPTIMIZER),
    "overlap_p2p_comm": implied(FOLLOWS_SCHEDULE),
    "batch_p2p_comm": implied(FOLLOWS_SCHEDULE),
    # Kernels and number formats
    "transformer_impl": implied(reasons.KERNELS),
    "attention_backend": implied(reasons.KERNELS),
    "use_flash_attn": implied(reasons.KERNELS),
    "apply_rope_fusion": implied(reasons.KERNELS),
    "persist_layer_norm": implied(reasons.KERNELS),
    "masked_softmax_fusion": implied(reasons.KERNELS),
    "bias_dropout_fusion": implied(reasons.KERNELS),
    "gradient_accumulation_fusion": implied(reasons.KERNELS),
    "cross_entropy_loss_fusion": implied(reasons.KERNELS),
    "bf16": implied("actor.dtype is the number format"),
    "cuda_graph*": off("CUDA graphs are not captured in training"),
    "fp8*": off(reasons.MIXED_PRECISION),
    # Sequences and losses
    "variable_seq_lengths": implied("sequences are always packed at their own lengths"),
    "calculate_per_token_loss": implied("actor.loss_aggregation is how the loss is averaged"),
    "mtp_num_layers": off("multi-token prediction is not offered"),
    "*": unknown("Megatron-Core"),
}
"""Options of Megatron-Core's TransformerConfig.

The degrees of parallelism and, for the actor, what is recomputed are read by `degrees` and `recompute`.
"""

DDP: Mapping[str, Rule] = {
    **_by_name(MegatronDDPFields, "ddp"),
    "overlap_grad_reduce": to("actor.megatron.ddp.overlap_grad_reduce", flag),
    "use_distributed_optimizer": TRANSFORMER["use_distributed_optimizer"],
    "average_in_collective": off("gradients are summed, then divided by global counts"),
    # Most of these options are flags: one that is off asks for nothing.
    "*": off("this option of Megatron-Core's DistributedDataParallelConfig is not among those that are converted"),
}
"""Options of Megatron-Core's DistributedDataParallelConfig."""

OPTIMIZER_STATE: Mapping[str, Rule] = {
    "use_precision_aware_optimizer": implied(reasons.EACH_STATE),
    "exp_avg_dtype": to("actor.megatron.optimizer.exp_avg_dtype", DTYPE),
    "exp_avg_sq_dtype": to("actor.megatron.optimizer.exp_avg_sq_dtype", DTYPE),
    "store_param_remainders": to("actor.megatron.optimizer.store_param_remainders", flag),
    **dict.fromkeys(
        ("main_grads_dtype", "main_params_dtype"),
        only("float32", "fp32", "torch.float32", holds="master weights and their gradients are float32"),
    ),
}
"""Options of Megatron-Core's OptimizerConfig for the precision of its state."""


def degrees(draft: Draft, role: Role, prefix: str) -> None:
    """Read the degrees of parallelism that the source writes below `prefix`."""
    for name, degree in DEGREES.items():
        if draft.writes(prefix + name):
            draft.lay_out(prefix + name, role, degree)


def recompute(draft: Draft, prefix: str, switch: str, is_on: bool) -> None:
    """Convert the actor's `recompute_granularity` below `prefix`.

    Args:
        draft: receives the recipe's value and the entries.
        prefix: what stands before Megatron-Core's names.
        switch: the framework's own key for gradient checkpointing.
        is_on: its value. If it is off, nothing below `prefix` has an effect; if it is on but no granularity is
            written, Megatron-Core recomputes nothing.
    """
    key, moe = prefix + "recompute_granularity", prefix + "moe_layer_recompute"
    granularity = draft.get(key) if is_on else None
    if granularity in ("full", "selective"):
        draft.mapped(key, "actor.megatron.recompute", granularity)
        draft.implied(switch, f"it follows from {key}")
        draft.implied(moe, f"it follows from {key}")
    elif draft.get(moe) is True and is_on:
        draft.mapped(moe, "actor.megatron.recompute", "selective", "the activations of the MLP and of the experts")
        draft.implied(switch, f"it follows from {moe}")
    recompute_ways(draft, prefix, granularity)
    draft.implied(key, "without gradient checkpointing, nothing is recomputed")
    draft.implied(moe, "nothing is recomputed, as by default")
    draft.implied(switch, f"without {key}, Megatron-Core recomputes nothing" if is_on else "it is off, as by default")


def recompute_ways(draft: Draft, prefix: str, granularity: Any) -> None:
    """Convert which layers or modules are recomputed, as far as `granularity` reads them."""
    for name, (needed, default, convert) in RECOMPUTED.items():
        key = prefix + name
        if not draft.writes(key) or draft.get(key) is None:
            draft.implied(key, "it is not set")
        elif granularity != needed:
            draft.implied(key, f"it is read with recompute_granularity={needed}")
        elif draft.get(key) == default:
            draft.implied(key, "it is the default")
        else:
            draft.mapped(key, f"actor.megatron.transformer.{name}", draft.read(key, convert))


def checkpoint_layers(draft: Draft, switch: str, is_on: bool, backend: str = "fsdp") -> None:
    """Convert gradient checkpointing that recomputes whole layers, as that of FSDP, DeepSpeed and Archon does.

    Args:
        draft: receives the recipe's value and the entries.
        switch: the framework's key.
        is_on: its value.
        backend: the engine that trains here.
    """
    if is_on:
        draft.mapped(switch, f"actor.{backend}.recompute", "full", "whole layers are recomputed, as there")
    draft.implied(switch, "it is off, as by default")


def router_defaults(draft: Draft, prefix: str, model: str, known: Mapping[str, Any]) -> None:
    """Take the framework's defaults of what changes how the router of a mixture of experts is trained.

    Args:
        draft: takes the defaults of keys that the source does not write.
        prefix: what stands before Megatron-Core's names.
        model: name or folder of the model; a dense one has no router.
        known: the framework's defaults, as far as they are known.
    """
    if is_moe(model):
        unknown = dict.fromkeys(("moe_router_dtype", "moe_aux_loss_coeff"), UNKNOWN)
        draft.assume({prefix + name: value for name, value in {**unknown, **known}.items()})


def ignore(draft: Draft, section: str) -> None:
    """Make Megatron-Core's options below `section` implied, for a source that trains with another engine."""
    for key in draft.keys(f"{section}*"):
        draft.implied(key, "only Megatron-Core reads this, and the source trains with another engine")
