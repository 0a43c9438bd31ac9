"""ROLL's layouts: each role has a strategy with its degrees, and a list of devices."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold_import import megatron, reasons
from fivefold_import.defaults import UNKNOWN
from fivefold_import.draft import Draft, Role, RolePlan
from fivefold_import.models import router_aux_loss
from fivefold_import.roll.rules import CONFIG, CRITIC, INFER, REF, TRAIN
from fivefold_import.settings import rollout_engine
from fivefold_import.values import flag

STRATEGY = "strategy_args.strategy_name"
NO_CHECKPOINTING = "model_args.disable_gradient_checkpointing"


def router(draft: Draft, train: str = TRAIN) -> None:
    """Take the defaults of a router that is trained with Megatron-Core; `train` is the section of its trainer.

    The weight of its auxiliary loss is Megatron-Core's option, else the one in `model_args`, else the model's own.
    """
    plan, own, option = draft.plans.get("actor"), train + "model_args.moe_aux_loss_coef", "moe_aux_loss_coeff"
    if plan is None or plan.shards_weights:
        return
    model = str(draft.get("pretrain", draft.get(train + "model_args.model_name_or_path", "")))
    weight = router_aux_loss(model)
    known = {"moe_token_dispatcher_type": "allgather", option: UNKNOWN if weight is None else weight}
    if draft.writes(train + CONFIG + option):
        draft.implied(own, f"{train}{CONFIG}{option} overrides it")
    elif draft.writes(own):
        known[option] = None
    megatron.router_defaults(draft, train + CONFIG, model, known)


def lay_out(draft: Draft, train: str = TRAIN) -> None:
    """Read how actor, reference and rollout are laid out, and what is recomputed; `train` is the actor's section."""
    sections: Mapping[Role, str] = {"actor": train, "ref": REF, "critic": CRITIC}
    for role, section in sections.items():
        if draft.keys(section + "*"):
            _lay_out_trainer(draft, role, section)
    if draft.keys(INFER + "*"):
        lay_out_engine(draft, "rollout", INFER)
    switch = train + NO_CHECKPOINTING
    is_on = not draft.read(switch, flag)
    if (plan := draft.plans.get("actor")) is not None and plan.shards_weights:
        megatron.checkpoint_layers(draft, switch, is_on)
    else:
        megatron.recompute(draft, train + CONFIG, switch, is_on)


def lay_out_frozen(draft: Draft, role: Role, section: str) -> RolePlan | None:
    """Return how a reward model or a teacher is laid out; None if not on Megatron-Core: it is laid out as the actor."""
    if not str(draft.get(section + STRATEGY, "")).startswith("megatron"):
        return None
    _lay_out_trainer(draft, role, section)
    return draft.plans[role]


def _plan(draft: Draft, devices_key: str) -> RolePlan:
    """Return the plan of a role whose list of devices is `devices_key`."""
    plan = RolePlan(devices=draft.get(devices_key), devices_key=devices_key)
    if draft.writes(devices_key):
        plan.keys[devices_key] = ""
    return plan


def _lay_out_trainer(draft: Draft, role: Role, section: str) -> None:
    key = section + "device_mapping"
    plan = draft.plans[role] = _plan(draft, key)
    strategy = str(draft.get(section + STRATEGY, "deepspeed_train"))
    if strategy.startswith("megatron"):
        megatron.degrees(draft, role, section + CONFIG)
        plan.keys[section + STRATEGY] = ""
    elif strategy.startswith(("fsdp2", "deepspeed")):
        plan.backend = "fsdp"
        plan.keys[section + STRATEGY] = ""
        if strategy.startswith("deepspeed"):
            plan.keys[section + STRATEGY] = reasons.ON_FSDP
            draft.all_unsupported(
                section + CONFIG + "*", "FSDP trains in DeepSpeed's place, and does not read its options"
            )
        if draft.writes(section + "model_args.ulysses_size"):
            draft.lay_out(section + "model_args.ulysses_size", role, "cp")
    else:
        # hf_infer keeps whole copies of the reference, so there is no layout to convert.
        for written in (section + STRATEGY, key):
            draft.implied(written, "the reference runs in the actor's processes")
        del draft.plans[role]


def lay_out_engine(draft: Draft, role: Role, section: str) -> RolePlan:
    """Read how a role that generates is laid out; `section` is the beginning of its keys."""
    key = section + "device_mapping"
    plan = draft.plans[role] = _plan(draft, key)
    plan.backend = "vllm"
    if draft.writes(section + STRATEGY):
        rollout_engine(draft, section + STRATEGY, role)
    tensor = [section + CONFIG + name for name in ("tensor_parallel_size", "tp_size")]
    for written in filter(draft.writes, tensor):
        draft.lay_out(written, role, "tp")
    if draft.writes(section + CONFIG + "pipeline_parallel_size"):
        draft.lay_out(section + CONFIG + "pipeline_parallel_size", role, "pp")
    per_worker = section + "num_gpus_per_worker"
    if plan.backend == "sglang" and draft.writes(per_worker) and not any(map(draft.writes, tensor)):
        draft.lay_out(per_worker, role, "tp")
    draft.implied(per_worker, f"it follows from the {role}'s degrees")
    return plan
