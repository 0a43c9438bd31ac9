"""Layouts: another framework's degrees and lists of devices as allocation strings.

The data-parallel degree `d` follows from the devices: their number over the number in a replica.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fivefold.config.roles import ROLES
from fivefold.config.schema.preferences import DPORecipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.layout.allocation import Allocation, RoleAllocation
from fivefold.layout.backends import BACKENDS
from fivefold.layout.devices import device_text, parse_devices
from fivefold.layout.errors import AllocationError, RuleError
from fivefold.layout.parser import parse, parse_role
from fivefold_import.adapters import drop_other_bridges
from fivefold_import.critic import NOT_TRAINED, has_critic
from fivefold_import.draft import Draft, Role, RolePlan
from fivefold_import.models import is_moe, known_shape
from fivefold_import.reasons import NO_REFERENCE
from fivefold_import.settings import COEFF

DEFAULT_GPUS_PER_NODE = 8
ANY_ROLLOUT = "transformers:d*"
_TRAINERS = "|".join(name for name, backend in BACKENDS.items() if backend.trains)
"""A regular expression of the engines that train."""


def lay_out(draft: Draft) -> None:
    """Convert the draft's role plans to `actor.backend`, `rollout.backend`, `ref.backend` and `rollout.colocate`.

    The keys of a plan that does not fit its devices become unsupported; the role then takes all devices that there are.
    """
    _check_strings(draft)
    drop_other_bridges(draft)
    if not draft.compares_with_reference:
        _drop_reference(draft)
    if not has_critic(draft):
        _drop_critic(draft)
    _read_device_lists(draft)
    actor = _settle(draft, "actor")
    _settle(draft, "rollout")
    if actor is not None and "rollout" not in draft.plans and draft.schema is TrainRecipe:
        draft.recipe |= {"rollout.backend": ANY_ROLLOUT, "rollout.colocate": True}
        draft.notes.append(f"rollout.backend={ANY_ROLLOUT}, on the actor's devices: the source lays out no rollout")
    if draft.is_shared is not None and {"actor", "rollout"} <= set(draft.plans):
        draft.recipe.setdefault("rollout.colocate", draft.is_shared)
    _settle_reference(draft, actor)
    _settle_critic(draft)
    _settle_frozen(draft)
    _drop_options_of_other_engines(draft)


def _drop_options_of_other_engines(draft: Draft) -> None:
    """Remove the keys of a trained role that only another engine reads, such as losses of Megatron-Core's router."""
    for role in ("actor", "critic"):
        engine = engine_of(draft, role)
        for key in [key for key in draft.recipe if key.startswith((f"{role}.megatron.", f"{role}.fsdp."))]:
            if key.split(".")[1] != engine:
                draft.demote(key, f"the {role} runs on {BACKENDS[engine].title}, which has no such option")


def engine_of(draft: Draft, role: str) -> str:
    """Return the engine that the recipe trains a role with; the critic has the actor's unless it has its own."""
    written = draft.recipe.get("allocation_mode")
    layouts = [str(written)] if written else [str(draft.recipe.get(f"{key}.backend", "")) for key in (role, "actor")]
    patterns = (rf"\b({_TRAINERS})\[{role}\]", rf"\b({_TRAINERS})\b")
    found = (re.search(pattern, layout) for pattern in patterns for layout in layouts)
    return next((match[1] for match in found if match), "megatron")


def _settle(draft: Draft, role: Role) -> RoleAllocation | None:
    """Convert one role's plan, and return its allocation; None if there is no plan, or it does not fit."""
    plan = draft.plans.get(role)
    if plan is None:
        return None
    to = f"{ROLES[role].key}.backend"
    try:
        allocation = _fitting(draft, plan)
    except ValueError as error:
        draft.recipe[to] = f"{plan.backend}:d*"
        for key in plan.keys:
            draft.unsupported(key, f"{error}; {role} is laid out as {draft.recipe[to]} instead")
        return None
    draft.recipe[to] = str(allocation)
    for key, note in plan.keys.items():
        draft.mapped(key, to, str(allocation), note)
    return allocation


def _drop_reference(draft: Draft) -> None:
    """Remove the reference's layout and devices: without a KL term, it is not loaded."""
    plan = draft.plans.pop("ref", None)
    for key in plan.keys if plan else ():
        draft.implied(key, NO_REFERENCE)
    if "allocation_mode" not in draft.recipe:
        return
    allocation = parse(draft.recipe["allocation_mode"])
    groups = [tuple(role for role in group if role.role != "ref") for group in allocation.groups]
    kept = tuple(group for group in groups if group)
    if kept and kept != allocation.groups:
        draft.revise("allocation_mode", str(Allocation(kept)), NO_REFERENCE)


def _drop_critic(draft: Draft) -> None:
    """Remove the critic's layout and devices, if the run has no critic."""
    plan = draft.plans.pop("critic", None)
    for key in plan.keys if plan else ():
        draft.implied(key, NOT_TRAINED)


def _settle_critic(draft: Draft) -> None:
    """Convert the critic's plan; a critic without one is laid out as the actor."""
    if "critic" in draft.plans:
        _settle(draft, "critic")
    elif has_critic(draft) and "allocation_mode" not in draft.recipe and "actor.backend" in draft.recipe:
        draft.recipe.setdefault("critic.backend", draft.recipe["actor.backend"])


def _settle_frozen(draft: Draft) -> None:
    """Convert the plans of a reward model and of a teacher; without one, they are laid out as the actor is."""
    if "allocation_mode" in draft.recipe:
        return
    _settle_judge(draft)
    signs: Mapping[Role, str] = {"reward": "reward.model.path", "teacher": COEFF}
    for role, sign in signs.items():
        if sign not in draft.recipe:
            continue
        _settle(draft, role)
        for key in ("backend", "device_mapping"):
            if f"actor.{key}" in draft.recipe:
                for section in _sections(draft, role):
                    draft.recipe.setdefault(f"{section}.{key}", draft.recipe[f"actor.{key}"])


def _sections(draft: Draft, role: Role) -> list[str]:
    """Return the dotted keys of a role's sections: several teachers have one each."""
    several = [key.removesuffix(".path") for key in draft.recipe if re.fullmatch(r"teachers\.[^.]+\.path", key)]
    return several if role == "teacher" and several else [ROLES[role].key]


def _settle_judge(draft: Draft) -> None:
    """Convert the plan of a model that judges, which takes turns on the actor's devices if it has no others."""
    plan = draft.plans.get("judge")
    if plan is None:
        return
    _settle(draft, "judge")
    if "actor.device_mapping" in draft.recipe:
        draft.recipe.setdefault("reward.judge.device_mapping", draft.recipe["actor.device_mapping"])
    elif not plan.has_processes:
        draft.recipe.setdefault("reward.judge.colocate", True)


def _settle_reference(draft: Draft, actor: RoleAllocation | None) -> None:
    """Convert the reference's plan: it runs in the actor's processes, with its own layout only if that differs."""
    plan = draft.plans.get("ref")
    if plan is None:
        return
    try:
        own = _fitting(draft, plan)
    except ValueError as error:
        reason = f"{error}; the reference is laid out as the actor instead"
        for key in plan.keys:
            draft.unsupported(key, reason)
        return
    if plan.has_processes or actor is None or replace(own, vpp=1) != replace(actor, vpp=1):
        if "actor.device_mapping" in draft.recipe:
            _list_reference(draft, plan)
        for key, note in plan.keys.items():
            draft.mapped(key, "ref.backend", str(own), note)
    for key in plan.keys:
        draft.implied(key, "the reference runs in the actor's processes, laid out as the actor")


def _list_reference(draft: Draft, plan: RolePlan) -> None:
    """Give a reference with its own layout its list of devices, or the actor's if it has none."""
    to = "ref.device_mapping"
    if plan.devices_key in plan.keys:
        draft.mapped(plan.devices_key, to, device_text(parse_devices(str(plan.devices))), plan.keys[plan.devices_key])
    draft.recipe.setdefault(to, draft.recipe["actor.device_mapping"])


def _fitting(draft: Draft, plan: RolePlan) -> RoleAllocation:
    """Return the plan's allocation; with whole experts, if an expert tensor degree that is not written does not fit.

    Raises:
        ValueError: the plan does not fit its devices.
    """
    try:
        return _allocation(draft, plan)
    except RuleError as error:
        degree = _expert_tensor_degree(draft, plan)
        if "etp" in plan.degrees or degree == 1:
            raise
        whole = _allocation(draft, replace(plan, degrees={**plan.degrees, "etp": 1}))
        split = f"experts are split t{degree} ways"
        note = f"without an expert tensor degree, {split}, but {error.rule}: set to 1"
        if note not in draft.notes:
            draft.notes.append(note)
        return whole


def _allocation(draft: Draft, plan: RolePlan) -> RoleAllocation:
    """Return the plan's allocation on its devices.

    Raises:
        ValueError: the devices do not hold whole replicas, or the experts' degrees do not fit a pipeline stage.
    """
    replica = plan.get("tp") * plan.get("pp") * plan.get("cp")
    dp = None
    if plan.n_devices is not None:
        if plan.n_devices < replica or plan.n_devices % replica:
            holds = "device does" if plan.n_devices == 1 else "devices do"
            raise ValueError(f"{plan.n_devices} {holds} not hold whole replicas of t*p*c = {replica}")
        dp = plan.n_devices // replica
    return RoleAllocation(
        plan.backend,
        dp=dp,
        tp=plan.get("tp"),
        pp=plan.get("pp"),
        cp=plan.get("cp"),
        vpp=plan.get("vpp"),
        ep=plan.get("ep"),
        etp=_expert_tensor_degree(draft, plan),
    )


def _expert_tensor_degree(draft: Draft, plan: RolePlan) -> int:
    """Return the expert tensor degree that the source writes; else 1, or the tensor degree if the framework says so.

    It is 1 for dense models, which have no experts.
    """
    if plan.backend != "megatron":
        return 1
    model = _model(draft)
    if not (is_moe(model) or (plan.get("ep") > 1 and known_shape(model) is None)):
        return 1
    return plan.degrees.get("etp", plan.get("tp") if plan.etp_follows_tp else 1)


def _model(draft: Draft) -> str:
    return str(draft.recipe.get("actor.path", ""))


# Lists of devices


def _read_device_lists(draft: Draft) -> None:
    """Read how many devices each role has, which roles share them, and how many nodes that takes."""
    lists = _parsed_lists(draft)
    if not lists:
        return
    per_node = draft.recipe.get("cluster.n_gpus_per_node") or DEFAULT_GPUS_PER_NODE
    last = max(device for devices in lists.values() for device in devices)
    draft.recipe.setdefault("cluster.n_nodes", last // per_node + 1)
    sets = {role: set(devices) for role, devices in lists.items()}
    if _needs_lists(draft, sets):
        _place_by_lists(draft, lists)
        return
    if {"actor", "rollout"} <= set(sets):
        draft.is_shared = sets["actor"] == sets["rollout"]
        if not draft.is_shared and min(sets["actor"]) < min(sets["rollout"]):
            draft.notes.append(
                "Fivefold gives the cluster's first devices to the rollout, and the next ones to the actor"
            )
    if {"actor", "ref"} <= set(sets) and sets["actor"] != sets["ref"]:
        plan = draft.plans["ref"]
        plan.keys.pop(plan.devices_key)
        draft.unsupported(plan.devices_key, "every role gets a list of devices or none does, and the rollout has none")
        plan.n_devices = draft.plans["actor"].n_devices


WRAPPED = re.compile(r"^list\((\[[^\[\]()]*\])\)$")
"""A list that is made a list once more, as ROLL's files may have it."""


def _parsed_lists(draft: Draft) -> dict[Role, tuple[int, ...]]:
    """Return the devices of each role whose list can be read, and count them in the role's plan."""
    lists: dict[Role, tuple[int, ...]] = {}
    for role, plan in draft.plans.items():
        if plan.devices is None:
            continue
        try:
            lists[role] = parse_devices(WRAPPED.sub(r"\1", str(plan.devices)))
        except AllocationError as error:
            del plan.keys[plan.devices_key]
            draft.unsupported(plan.devices_key, f"{error.rule}; {error.fix}")
            continue
        plan.n_devices = len(lists[role])
        plan.keys[plan.devices_key] = f"{plan.n_devices} devices"
    return lists


def _needs_lists(draft: Draft, sets: Mapping[Role, set[int]]) -> bool:
    """Return whether roles share devices in another way than `rollout.colocate` can say: all of them, or none.

    A reference without its own list runs in the actor's processes, and the other models on the actor's devices.
    Without a rollout, lists are needed for a reference on other devices.
    """
    if "actor" not in sets or ("rollout" not in sets and draft.schema is not DPORecipe):
        return False
    actor = sets["actor"]
    rollout = sets.get("rollout", actor)
    is_beside = all(devices == actor for role, devices in sets.items() if role != "rollout")
    return not (is_beside and (actor == rollout or not actor & rollout))


def _place_by_lists(draft: Draft, lists: Mapping[Role, tuple[int, ...]]) -> None:
    """Give each role its list of devices; roles whose lists overlap take turns."""
    for role, devices in lists.items():
        plan = draft.plans[role]
        if role == "ref":  # It needs a list if it has its own layout, which is not known yet.
            plan.has_processes = set(devices) != set(lists["actor"])
            continue
        plan.keys.pop(plan.devices_key)
        to = f"{ROLES[role].key}.device_mapping"
        draft.mapped(plan.devices_key, to, device_text(devices), f"{len(devices)} devices")
    if has_critic(draft):
        draft.recipe.setdefault("critic.device_mapping", draft.recipe["actor.device_mapping"])


# Allocation strings that the source itself has


def _check_strings(draft: Draft) -> None:
    """Remove allocation strings that cannot be read as a layout; their keys become unsupported."""
    for key in ("allocation_mode", "actor.backend", "rollout.backend", "ref.backend", "critic.backend"):
        value: Any = draft.recipe.get(key)
        if value is None:
            continue
        try:
            parse(value) if key == "allocation_mode" else parse_role(value)
        except (AllocationError, RuleError) as error:
            draft.demote(key, f"{error.rule}; {error.fix}")
