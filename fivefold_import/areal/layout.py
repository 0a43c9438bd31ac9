"""AReaL's layouts: one string for all roles, or one for each, whose older forms leave the training backend out."""

from __future__ import annotations

import re

from fivefold_import import reasons
from fivefold_import.draft import Draft
from fivefold_import.values import number

TRAINERS = ("fsdp", "megatron", "archon")
"""The engines that AReaL trains with."""
TRAINER = re.compile(rf"\b(?:{'|'.join(TRAINERS)})\b")
NO_BACKEND = re.compile(r"(?:[dtpce]\d+)+")
"""Degrees without a backend in front of them, such as `d4t2`."""


def backends(draft: Draft) -> set[str]:
    """Convert the layout: one string for all roles, or one for each; older strings leave the training backend out.

    Returns:
        The engines that the source trains with.
    """
    trainers: set[str] = set()
    if draft.get("allocation_mode"):
        trainer = str(draft.get("actor.backend", ""))
        allocation = modern(str(draft.get("allocation_mode")), trainer if trainer in TRAINERS else None)
        trainers |= _map_layout(draft, "allocation_mode", allocation)
        for key in ("actor.backend", "rollout.backend"):
            if NO_BACKEND.search(str(draft.get(key, ""))) is None:
                draft.implied(key, "allocation_mode overrides it")
    for role in ("actor", "rollout", "critic"):
        key = f"{role}.backend"
        if draft.is_open(key) and draft.get(key):
            trainers |= _map_layout(draft, key, modern(str(draft.get(key))))
    if draft.get("ref.backend") and draft.read("actor.kl_ctl", number, 0.1) > 0:
        value = modern(str(draft.get("ref.backend")))
        if offered(value) == draft.recipe.get("actor.backend"):
            draft.implied("ref.backend", "the reference runs in the actor's processes, laid out as the actor")
        _map_layout(draft, "ref.backend", value)
    draft.implied("ref.backend", reasons.NO_REFERENCE)
    _colocation(draft)
    # An actor without a layout gets the recipe's default, one Megatron worker.
    return trainers or {"megatron"}


def trainers_backend(draft: Draft) -> set[str]:
    """Convert the layout of a source that only trains, whose older form is `allocation_mode`; the rest is as above."""
    key = "allocation_mode" if draft.get("allocation_mode") else "actor.backend"
    parts = modern(str(draft.get(key, "megatron:d1"))).split("+")
    layout = next((part for part in parts if TRAINER.search(part)), parts[-1])
    # Without degrees, all devices train.
    trainers = _map_layout(draft, key, f"{layout}:d*" if layout in TRAINERS else layout, "actor.backend")
    draft.implied("actor.backend", "allocation_mode overrides it")
    for own in draft.keys("ref.backend"):
        value = offered(modern(str(draft.get(own))))
        if value != draft.recipe.get("actor.backend"):
            draft.mapped(own, "ref.backend", value)
        draft.implied(own, "the reference runs in the actor's processes, laid out as the actor")
    _colocation(draft)
    return trainers


def _map_layout(draft: Draft, key: str, layout: str, to: str = "") -> set[str]:
    """Map `key` to `layout` on the engines that are offered; return the engines that the source trains with."""
    trainers = set(TRAINER.findall(layout))
    is_other = "archon" in trainers
    draft.mapped(key, to or key, offered(layout), reasons.ON_MEGATRON if is_other else "")
    if is_other and reasons.WHOLE_WEIGHTS not in draft.notes:
        draft.notes.append(reasons.WHOLE_WEIGHTS)
    return trainers


def offered(layout: str) -> str:
    """Return the layout with Megatron-Core in the place of Archon, with the same degrees."""
    return re.sub(r"\barchon\b", "megatron", layout)


def modern(allocation: str, trainer: str | None = None) -> str:
    """Return a layout in today's form: `sglang.d4p1t1+d2t2` becomes `sglang:d4+fsdp:d2t2`.

    Every part names its backend, and degrees of 1 are left out where the backend does not need them.

    Args:
        allocation: the layout as AReaL reads it.
        trainer: the training backend of a part that names none; None: the one that its degrees need.
    """
    return re.sub(r"[^+|()]+", lambda match: _modern_role(match[0], trainer), allocation.strip())


def _modern_role(role: str, trainer: str | None) -> str:
    role = re.sub(r"^(sglang|vllm)\.", r"\1:", role)
    if NO_BACKEND.fullmatch(role):
        # Pipeline and expert degrees have always needed Megatron-Core.
        needed = "megatron" if re.search(r"[pe](?!1(?![0-9]))", role) else "fsdp"
        role = f"{trainer or needed}:{role}"
    backend, colon, degrees = role.partition(":")
    if backend.partition("[")[0] in ("sglang", "vllm", "fsdp") and NO_BACKEND.fullmatch(degrees):
        degrees = re.sub(r"[tpce]1(?![0-9])", "", degrees) or "d1"
    return f"{backend}{colon}{degrees}"


def _colocation(draft: Draft) -> None:
    """Convert which roles share devices: none, unless one is scheduled onto another's."""
    for role, other in (("actor", "rollout"), ("rollout", "actor")):
        key, target = f"{role}.scheduling_strategy.type", f"{role}.scheduling_strategy.target"
        if draft.get(key) == "colocation" and draft.get(target) == other:
            draft.mapped(key, "rollout.colocate", True)
            draft.implied(target, f"it follows from {key}")
        draft.implied(key, "roles have their own devices where the cluster has room")
    draft.all_implied("ref.scheduling_strategy*", "the reference runs in the actor's processes")
