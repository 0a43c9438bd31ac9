"""Low-rank adapters (LoRA): their rank, and which layers have them.

all-linear                   ──> the default of actor.lora.targets: every layer
[linear_qkv, linear_proj]    ──> [q_proj, k_proj, v_proj, o_proj]     Megatron-Core's names
all-linear without o_proj    ──> the other layers of the model, if its shape is known
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from fivefold.families.adapters import layer_of
from fivefold.families.shape import ModelShape
from fivefold.families.tensors import tensors
from fivefold_import import reasons
from fivefold_import.draft import Draft
from fivefold_import.models import is_moe, known_shape
from fivefold_import.values import Unfit, positive

SECTION = "actor.lora."
RANK, TARGETS = f"{SECTION}rank", f"{SECTION}targets"
RANK_OF_EXPERTS = f"{SECTION}rank_of_experts"
EVERY = ("all-linear", "all_linear", "all", "*")
"""Names that frameworks give to all linear layers."""
OF_MEGATRON: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj",),
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
}
"""Layers by Megatron-Core's names, which Megatron-Bridge takes."""
OF_BLOCK = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
"""The linear layers of most models' blocks."""
NEVER_ADAPTED = re.compile(r"visual|vision|merger|router|lm_head|output_layer|embed|(^|\W)gate\W*$")
"""Names of what has no adapters here: routers, embeddings, the output layer, and what reads images."""
EXPRESSION = re.compile(r"[*$^|()\[\]\\+?]")
"""A sign that a text is a regular expression, and not the names of layers."""


def convert_adapters(
    draft: Draft, section: str, rank: str, model: str, *, targets: str, excluded: str = "", whole_rank: bool = True
) -> None:
    """Convert the adapters of a model: whether it has any, and on which layers. Tables have the keys of one value each.

    Args:
        draft: receives the recipe's values and the entries.
        section: what precedes the source's keys.
        rank: the key of the rank.
        model: name or folder of the model.
        targets: the key of the layers that have adapters.
        excluded: the key of layers that have none.
        whole_rank: whether each expert's adapters have the rank of the others.
    """
    with suppress(Unfit):  # The key of the rank reports it.
        value = positive(draft.get(section + rank))
        draft.recipe.setdefault(draft.target(RANK), value)
        if whole_rank and is_moe(model):
            to = draft.target(RANK_OF_EXPERTS)
            draft.recipe[to] = value
            draft.notes.append(f"{to}={value}: the adapters of each expert have the whole rank, as in the source")
    _convert_layers(draft, model, section + targets, section + excluded if excluded else "")


def _convert_layers(draft: Draft, model: str, targets: str, excluded: str) -> None:
    """Convert the layers that have adapters."""
    chosen = _names(draft.get(targets)) or [EVERY[0]]
    without = [name for name in _names(draft.get(excluded)) if not NEVER_ADAPTED.search(name)]
    never = [name for name in chosen if NEVER_ADAPTED.search(name)]
    try:
        layers = _layers(model, [name for name in chosen if name not in never], without)
    except Unfit as error:
        draft.unsupported(excluded if without else targets, str(error))
        draft.unsupported(targets, str(error))
        return
    if never and layers is not None:
        draft.recipe.setdefault(draft.target(TARGETS), layers)
    if never:
        draft.unsupported(targets, f"{', '.join(never)}: {reasons.NEVER_ADAPTED}")
    if not without:
        draft.implied(excluded, reasons.NEVER_ADAPTED if draft.get(excluded) else "it is empty")
    for key in (targets, excluded):
        if layers is None:
            draft.implied(key, "every linear layer has adapters, as by default")
        else:
            draft.mapped(key, TARGETS, layers)


def _names(value: Any) -> list[str]:
    """Return the names in a list, or in a text that separates them by commas; a regular expression stays whole."""
    if isinstance(value, str) and (EXPRESSION.search(value) is None or value in EVERY):
        return [name.strip() for name in value.split(",") if name.strip()]
    return [] if value in (None, "") else [str(name) for name in (value if isinstance(value, list) else [value])]


def _layers(model: str, chosen: Sequence[str], without: Sequence[str]) -> list[str] | None:
    """Return the layers that have adapters, by name; None: every one.

    Raises:
        Unfit: it takes more than the names of layers to say which have adapters, or the model's are not known.
    """
    if not chosen:
        raise Unfit(f"no layer is left: {reasons.NEVER_ADAPTED}")
    if not without and any(name in EVERY for name in chosen):
        return None
    names = _hugging_face(chosen)
    if not without and all(re.fullmatch(r"\w+", name) for name in names):
        return None if set(names) == OF_BLOCK and names != list(chosen) else names
    shape = known_shape(model)
    if shape is None:
        raise Unfit(f"the layers of the model are not known here: list those that have adapters in {TARGETS}")
    return _layers_of(shape, names, _hugging_face(without))


def _hugging_face(names: Sequence[str]) -> list[str]:
    """Return Hugging Face's names in the place of Megatron-Core's, without doubles."""
    return list(dict.fromkeys(new for name in names for new in OF_MEGATRON.get(name, (name,))))


def _layers_of(shape: ModelShape, chosen: Sequence[str], without: Sequence[str]) -> list[str] | None:
    """Return the layers of a model whose weights' names match some of `chosen` and none of `without`; None: all.

    Raises:
        Unfit: weights of a layer match in some blocks, and not in others.
    """
    names = [name for tensor in tensors(shape) for name in tensor.names]
    layers = {name.removesuffix(".weight"): layer for name in names if (layer := layer_of(name)) is not None}
    picked = {name for name in layers if _matches(name, chosen) and not _matches(name, without)}
    found = {layers[name] for name in picked}
    if not found or picked != {name for name, layer in layers.items() if layer in found}:
        raise Unfit(f"{TARGETS} chooses layers by their names, in all blocks alike, and this does not")
    return (
        None if found == set(layers.values()) else [layer for layer in dict.fromkeys(layers.values()) if layer in found]
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Return whether one of the patterns is for a weight: the end of its name, or a regular expression of it all."""
    return any(
        pattern in EVERY or f".{name}".endswith(f".{pattern}") or _is_expression_of(pattern, name)
        for pattern in patterns
    )


def _is_expression_of(pattern: str, name: str) -> bool:
    if EXPRESSION.search(pattern) is None:
        return False
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error as error:
        raise Unfit(f"{pattern!r} is not a regular expression: {error}") from error


# The bridge


def drop_other_bridges(draft: Draft) -> None:
    """Remove the choice of another bridge than Fivefold's for models that have adapters."""
    for role in ("actor", "critic"):
        if any(key.startswith(f"{role}.lora.") for key in draft.recipe):
            reason = "adapters need Fivefold's own bridge, which loads the same weights"
            draft.demote(f"{role}.megatron.bridge_type", reason, "implied")
