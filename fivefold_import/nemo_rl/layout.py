"""How NeMo-RL lays out its models: on Megatron-Core, or with FSDP (`dtensor_cfg`), next to the rollout or with it."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold_import import megatron, reasons
from fivefold_import.adapters import convert_adapters
from fivefold_import.draft import Draft, Role, RolePlan
from fivefold_import.models import is_moe, router_aux_loss
from fivefold_import.settings import rollout_engine
from fivefold_import.values import flag, positive

POLICY, GENERATION, VALUE = "policy.", "policy.generation.", "value."
MEGATRON, DTENSOR = "megatron_cfg.", "dtensor_cfg."
APART = f"{GENERATION}colocated."
NO_EXPERTS = "a dense model has no experts"
OF_EXPERTS = ("moe_*", "expert_*", "freeze_moe_router", "track_moe_metrics")
"""Options of Megatron-Core that only mixtures of experts read."""
DEGREES: Mapping[str, tuple[str, str]] = {
    "vllm": ("vllm_cfg.tensor_parallel_size", "vllm_cfg.pipeline_parallel_size"),
    "sglang": ("sglang_cfg.tp_size", "sglang_cfg.pp_size"),
}
"""The keys of an engine's tensor and pipeline degrees."""


def n_devices(draft: Draft) -> tuple[int, int]:
    """Return the devices of the policy and of the rollout, which are the same ones unless it is not colocated."""
    nodes = draft.read("cluster.num_nodes", positive, 1)
    per_node = draft.read("cluster.gpus_per_node", positive, 1)
    if not draft.keys(f"{GENERATION}*") or draft.read(f"{APART}enabled", flag, True):
        return nodes * per_node, nodes * per_node
    own = draft.read(f"{APART}resources.gpus_per_node", positive, per_node)
    rollout = own if nodes == 1 else own * draft.read(f"{APART}resources.num_nodes", positive, 1)
    return max(1, nodes * per_node - rollout), rollout


def lay_out_rollout(draft: Draft, devices: int) -> None:
    """Read the rollout's engine, its degrees and whether it takes turns with the policy."""
    plan = draft.plans["rollout"] = RolePlan("vllm", n_devices=devices)
    draft.is_shared = draft.read(f"{APART}enabled", flag, True)
    draft.sets(f"{APART}enabled", "rollout.colocate", draft.is_shared)
    if not draft.is_shared:
        for key in draft.keys(f"{APART}resources.*"):
            plan.keys |= {key: ""} if draft.writes(key) else {}
    rollout_engine(draft, f"{GENERATION}backend")
    for engine, (tensor, pipeline) in DEGREES.items():
        if engine == plan.backend:
            draft.lay_out(GENERATION + tensor, "rollout", "tp")
            draft.lay_out(GENERATION + pipeline, "rollout", "pp")
        else:
            draft.all_implied(f"{GENERATION}{engine}_*", f"the rollout runs on {plan.backend}")
    for engine in ("trtllm", "dynamo"):
        draft.all_implied(f"{GENERATION}{engine}_*", f"{plan.backend} is laid out in the place of {engine}")


def lay_out_model(draft: Draft, role: Role, section: str, model: str, devices: int) -> RolePlan:
    """Read how a model of `policy`, `value` or `teacher` is laid out, and what only another engine reads of its keys.

    Args:
        draft: takes the role's plan.
        role: the role.
        section: what precedes the keys.
        model: name or folder of the model.
        devices: GPUs of the role.
    """
    plan = draft.plans[role] = RolePlan("fsdp", n_devices=devices)
    if draft.read(f"{section}{MEGATRON}enabled", flag, False):
        plan.backend = "megatron"
        plan.keys[f"{section}{MEGATRON}enabled"] = ""
        for name in (f"{DTENSOR}*", "optimizer*", "scheduler*"):
            draft.all_implied(section + name, "the model is trained on Megatron-Core: megatron_cfg has its keys")
        if not is_moe(model):
            for name in OF_EXPERTS:
                draft.all_implied(f"{section}{MEGATRON}{name}", NO_EXPERTS)
        megatron.degrees(draft, role, section + MEGATRON)
        return plan
    if draft.writes(f"{section}{DTENSOR}enabled"):
        plan.keys[f"{section}{DTENSOR}enabled"] = ""
    draft.all_implied(f"{section}{MEGATRON}*", "only Megatron-Core reads this, and dtensor_cfg is enabled")
    draft.lay_out(f"{section}{DTENSOR}tensor_parallel_size", role, "tp")
    draft.lay_out(f"{section}{DTENSOR}context_parallel_size", role, "cp")
    draft.implied(f"{section}{DTENSOR}expert_parallel_size", "FSDP shards experts as all other weights")
    return plan


def convert_engine(own: Draft, section: str, model: str, plan: RolePlan) -> None:
    """Convert what a trained model recomputes, its adapters and its router.

    Args:
        own: the draft, or the critic's view of it.
        section: what precedes the keys.
        model: name or folder of the model.
        plan: how the model is laid out.
    """
    _clipping(own, section, plan)
    if plan.shards_weights:
        switch = f"{section}{DTENSOR}activation_checkpointing"
        megatron.checkpoint_layers(own, switch, is_on=own.read(switch, flag, False))
        _adapters_of_fsdp(own, f"{section}{DTENSOR}lora_cfg.", model)
        return
    at, switch = section + MEGATRON, f"{section}{MEGATRON}activation_checkpointing"
    is_on = own.read(switch, flag, False)
    if is_on:
        own.assume({f"{at}recompute_granularity": "full"})
        if own.get(f"{at}recompute_granularity") == "selective" and not own.writes(f"{at}recompute_modules"):
            own.recipe[own.target("actor.megatron.transformer.recompute_modules")] = ["core_attn"]
    megatron.recompute(own, at, switch, is_on)
    if own.get(f"{at}moe_router_load_balancing_type", "none") != "none" and not own.writes(f"{at}moe_aux_loss_coeff"):
        megatron.router_defaults(own, at, model, {"moe_aux_loss_coeff": router_aux_loss(model)})
    if own.get(f"{at}peft.enabled") is True:
        if is_moe(model):
            own.notes.append(reasons.experts_apart(own.target("actor.lora").partition(".")[0]))
        peft = f"{at}peft."
        convert_adapters(
            own, peft, "dim", model, targets="target_modules", excluded="exclude_modules", whole_rank=False
        )


def _clipping(own: Draft, section: str, plan: RolePlan) -> None:
    """Switch clipping off for a largest norm of null, and recomputation, where the critic has none."""
    norm = f"{section}max_grad_norm"
    if not own.writes(norm) and own.keys(norm) and own.get(f"{section}{MEGATRON}optimizer.clip_grad") is None:
        own.recipe[own.target("actor.optimizer.gradient_clipping")] = 0.0
        own.notes.append(f"{own.target('actor.optimizer.gradient_clipping')}=0: {norm} is null")
    if own.target("actor.") != "actor.":
        own.recipe.setdefault(own.target(f"actor.{plan.backend}.recompute"), "none")


def _adapters_of_fsdp(own: Draft, section: str, model: str) -> None:
    """Convert the adapters of FSDP: of all linear layers if `match_all_linear` is on, else of those that are named."""
    if own.get(f"{section}enabled") is not True:
        return
    if own.get(f"{section}match_all_linear", True) is True:
        own.implied(f"{section}target_modules", "match_all_linear is on: every linear layer has adapters")
        convert_adapters(own, section, "dim", model, targets="", excluded="exclude_modules")
    else:
        convert_adapters(own, section, "dim", model, targets="target_modules", excluded="exclude_modules")
