"""Options of Megatron-Core, which several frameworks pass on under Megatron-Core's own names."""

from __future__ import annotations

from collections.abc import Mapping
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
from fivefold_import.defaults import UNKNOWN
from fivefold_import.draft import Degree, Draft, Role, Rule
from fivefold_import.models import is_moe
from fivefold_import.rules import off
from fivefold_import.tables import Row, Table, read_tables
from fivefold_import.values import Convert, Unfit, number, one_of, positive

DEGREES: Mapping[str, Degree] = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "etp",
}
SECTIONS: Mapping[str, type[MegatronFields]] = {"transformer": MegatronTransformerFields, "ddp": MegatronDDPFields}
"""The tables of keys that have a section of the recipe, with its fields."""


def _modules(value: Any) -> list[str]:
    """Return a list of modules, which some frameworks write as one text, `moe,layernorm`."""
    modules = [module.strip() for module in value.split(",")] if isinstance(value, str) else value
    if not isinstance(modules, list):
        raise Unfit(f"{value!r} is not a list of modules")
    return [_MODULE(module) for module in modules]


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


def _weights(value: Any) -> float | list[float]:
    return [number(one) for one in value] if isinstance(value, list) else number(value)


def _balancing(value: Any) -> Any:
    return [_BALANCING(one) for one in value] if isinstance(value, list) else _BALANCING(value)


_BALANCING = one_of(**{name: name for name in get_args(Balancing)})


def _router_loss(draft: Draft, source: str) -> None:
    """Map the weight of the router's auxiliary loss, which has no effect without load balancing."""
    balancing = f"{source.rpartition('.')[0]}.moe_router_load_balancing_type"
    if draft.get(balancing) == "none":
        draft.implied(source, f"{balancing} is none, so that there is no auxiliary loss")
    draft.mapped(source, "actor.megatron.transformer.moe_aux_loss_coeff", _weights(draft.get(source)))


def _by_name(section: type[MegatronFields], name: str) -> dict[str, Row]:
    """Return rows for the fields of a section that map to themselves, and for those that no recipe can set."""
    passed_on = HANDED_ON[section.owner] | (STAGES if section is MegatronTransformerFields else frozenset())
    refused = {field: Row(off(reason)) for field, reason in REFUSED[section.owner].items()}
    return {**refused, **{field: Row(_same(f"actor.megatron.{name}.{field}")) for field in sorted(passed_on)}}


def _same(key: str) -> Rule:
    """Map a field of Megatron-Core to the recipe's key of its name, whose own rules say what the value must be."""

    def rule(draft: Draft, source: str) -> None:
        if (value := draft.get(source)) is None:
            draft.implied(source, "it is not set")
        else:
            draft.mapped(source, key, value)

    return rule


def _bias_rate(draft: Draft, source: str) -> None:
    """Map the step of the routers' biases, which only routers that have them read."""
    if draft.get(source.rpartition(".")[0] + ".moe_router_enable_expert_bias"):
        draft.mapped(source, "actor.megatron.transformer.moe_router_bias_update_rate", number(draft.get(source)))
    draft.implied(source, "only routers with biases read this (moe_router_enable_expert_bias)")


def _balance(draft: Draft, source: str) -> None:
    """Map the kind of the load-balancing loss; without a loss, its weight stays 0."""
    if (kind := _balancing(draft.get(source))) in ("aux_loss", "none"):
        draft.implied(source, "moe_aux_loss_coeff is the weight of the auxiliary loss")
    else:
        draft.mapped(source, "actor.megatron.transformer.moe_router_load_balancing_type", kind)


TABLES: Mapping[str, Table] = {
    title: Table(_by_name(SECTIONS[title], title)) | table if title in SECTIONS else table
    for title, table in read_tables("megatron", globals()).items()
}
"""Options of Megatron-Core's TransformerConfig and DistributedDataParallelConfig, and of its optimizer's precision.

`degrees` and `recompute` convert the degrees of parallelism and, for the actor, recomputation.
"""


def degrees(draft: Draft, role: Role, prefix: str) -> None:
    """Read the degrees of parallelism that the source writes below `prefix`."""
    for name, degree in DEGREES.items():
        if draft.writes(prefix + name):
            draft.lay_out(prefix + name, role, degree)


def recompute(draft: Draft, prefix: str, switch: str, is_on: bool) -> None:
    """Convert the actor's `recompute_granularity` below `prefix`.

    Args:
        draft: receives the recipe's value and the entries.
        prefix: what precedes Megatron-Core's names.
        switch: the framework's own key for gradient checkpointing.
        is_on: its value. If it is off, nothing below `prefix` has an effect; if it is on but no granularity is
            written, Megatron-Core recomputes nothing, and a source that writes the switch gets `selective`.
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
    if is_on and draft.writes(switch) and draft.get(switch) is True:
        note = f"without {key}, Megatron-Core recomputes nothing there; this saves memory with the same results"
        draft.mapped(switch, "actor.megatron.recompute", "selective", note)
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
            try:
                draft.mapped(key, f"actor.megatron.transformer.{name}", convert(draft.get(key)))
            except Unfit as error:
                draft.unsupported(key, str(error))


def checkpoint_layers(draft: Draft, switch: str, is_on: bool, backend: str = "fsdp") -> None:
    """Convert gradient checkpointing that recomputes whole layers, as in FSDP, DeepSpeed and Archon.

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
        prefix: what precedes Megatron-Core's names.
        model: name or folder of the model; a dense one has no router.
        known: the framework's defaults, as far as they are known.
    """
    if is_moe(model):
        unknown = dict.fromkeys(("moe_router_dtype", "moe_aux_loss_coeff"), UNKNOWN)
        draft.assume({prefix + name: value for name, value in {**unknown, **known}.items()})


def ignore(draft: Draft, section: str) -> None:
    """Make Megatron-Core's options below `section` implied, for a source that trains with another engine."""
    draft.all_implied(f"{section}*", "only Megatron-Core reads this, and the source trains with another engine")
