"""Corrections for the mismatch of rollout and trainer: what frameworks call them, and their keys in the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from math import exp
from typing import Any

from fivefold_import.draft import Draft
from fivefold_import.values import Unfit, number

CORRECTION = "actor.rollout_correction."
MASKS: Mapping[str, tuple[str, str]] = {
    "token": ("token", "ratio"),
    "sequence": ("sequence", "ratio"),
    "geometric": ("geometric", "ratio"),
    **{
        f"{level}_{kind}": (ours, {"k1": "ratio"}.get(kind, kind))
        for level, ours in (
            ("token", "token"),
            ("seq_sum", "sequence"),
            ("seq_mean", "geometric"),
            ("seq_max", "largest"),
        )
        for kind in ("k1", "k2", "k3")
    },
    "binary_kl": ("token", "binary_kl"),
}
"""verl's names of masks, each with `mask` and `mask_by`."""
OFF = ("none", "null", "false", "disabled", "")
IN_RATIO = "in bypass mode PPO's ratio compares actor and rollout, so nothing else weights the loss"

CAP, MODE = "actor.behave_imp_weight_cap", "actor.behave_imp_weight_mode"
"""AReaL's keys for a cap of the decoupled objective's weights, in some releases."""
TOKENS_WEIGHT = "; each token has its own weight, not the geometric mean"


def correct_rollout(draft: Draft, key: str, keys: Mapping[str, Any], note: str = "") -> None:
    """Map `key`, which asks for a correction of the rollout's log-probs, to `method: custom` with other keys.

    Args:
        draft: receives the recipe's values.
        key: the source's key.
        keys: keys of `actor.rollout_correction`.
        note: how it was converted.
    """
    for name, value in keys.items():
        draft.recipe[CORRECTION + name] = value
    draft.mapped(key, CORRECTION + "method", "custom", note or ", ".join(f"{k}={v}" for k, v in keys.items()))


def truncated_weights(draft: Draft, key: str) -> None:
    """Convert the cap of truncated importance sampling; 0 and negative numbers switch it off."""
    if (cap := number(draft.get(key))) > 0:
        correct_rollout(draft, key, {"weight": "token", "weight_cap": cap})
    draft.implied(key, "it is switched off")


# verl's section `algorithm.rollout_correction`, or its keys without the section


def bypass(draft: Draft, key: str) -> None:
    """Convert whether the rollout's log-probs are the old ones."""
    if draft.get(key) is True:
        draft.mapped(key, "actor.recompute_logprob", False)
    draft.implied(key, "it is switched off")


def loss_of_bypass(draft: Draft, key: str) -> None:
    """Convert the loss of bypass mode: PPO's, or the policy gradient with importance weights."""
    if _bypasses(draft, key) and draft.get(key) == "reinforce":
        draft.mapped(key, "actor.loss", "reinforce")
    elif draft.get(key) in ("ppo_clip", "reinforce"):
        draft.implied(
            key, "only bypass_mode reads this" if draft.get(key) == "reinforce" else "it is PPO's clipped loss"
        )
    else:
        draft.unsupported(key, "in bypass mode, the loss is ppo_clip or reinforce")


def weights(draft: Draft, key: str) -> None:
    """Convert by what tokens are weighted."""
    level = str(draft.get(key)).lower()
    if level in OFF:
        draft.implied(key, "it is switched off")
    elif _weight_is_in_ratio(draft, key):
        draft.implied(key, IN_RATIO)
    elif level in ("token", "sequence"):
        correct_rollout(draft, key, {"weight": level})
    else:
        draft.unsupported(key, f"{level!r} is not offered: weights are by token or by sequence")


def cap_of_weights(draft: Draft, key: str) -> None:
    """Convert the cap of the weights; two bounds, as in `0.5_5.0`, leave out the tokens beyond them (IcePop)."""
    if str(draft.get(_beside(key, "rollout_is"))).lower() in OFF:
        return draft.implied(key, "only rollout_is reads this")
    if _weight_is_in_ratio(draft, key):
        return draft.implied(key, IN_RATIO)
    level = str(draft.get(_beside(key, "rollout_is"))).lower()
    if level not in ("token", "sequence"):
        return draft.unsupported(key, f"rollout_is={level} is not offered")
    low, high = _bounds(draft.get(key))
    if low is None:
        return draft.mapped(key, CORRECTION + "weight_cap", high)
    if str(draft.get(_beside(key, "rollout_rs"))).lower() not in OFF:
        return draft.unsupported(key, "there is one mask, and rollout_rs says which")
    return correct_rollout(draft, key, {"mask": level, "mask_below": low, "mask_above": high})


def normalized_weights(draft: Draft, key: str) -> None:
    """Convert whether weights are divided by their mean."""
    level = str(draft.get(_beside(key, "rollout_is"))).lower()
    if draft.get(key) is not True:
        draft.implied(key, "it is switched off")
    elif level in OFF:
        draft.implied(key, "only rollout_is reads this")
    elif level in ("token", "sequence") and not _weight_is_in_ratio(draft, key):
        draft.mapped(key, CORRECTION + "weight_normalized", True, "by the mean over the mini-batch, not over the step")
    else:
        draft.unsupported(key, "only weights of tokens and sequences are divided by their mean")


def masks(draft: Draft, key: str) -> None:
    """Convert by what tokens or sequences are left out."""
    name = str(draft.get(key)).lower()
    if name in OFF:
        draft.implied(key, "it is switched off")
    elif name in MASKS:
        mask, by = MASKS[name]
        correct_rollout(draft, key, {"mask": mask} | ({} if by == "ratio" else {"mask_by": by}))
    else:
        draft.unsupported(key, f"{name!r} is not offered: there is one mask, of {', '.join(MASKS)}")


def bounds_of_mask(draft: Draft, key: str) -> None:
    """Convert the bounds of the mask: one, or two as in `0.5_2.0`."""
    if _has_mask(draft, key):
        low, high = _bounds(draft.get(key))
        if low is not None:
            draft.recipe[CORRECTION + "mask_below"] = low
        draft.mapped(key, CORRECTION + "mask_above", high)


def lower_bound_of_mask(draft: Draft, key: str) -> None:
    """Convert the lower bound of the mask, which older releases write next to the upper one."""
    if _has_mask(draft, key):
        draft.mapped(key, CORRECTION + "mask_below", number(draft.get(key)))


def _has_mask(draft: Draft, key: str) -> bool:
    """Return whether there is a mask for a bound; otherwise the bound's key gets its entry."""
    name = str(draft.get(_beside(key, "rollout_rs"))).lower()
    if name in OFF:
        draft.implied(key, "only rollout_rs reads this")
    elif name not in MASKS:
        draft.unsupported(key, f"rollout_rs={name} is not offered")
    return name in MASKS


def veto(draft: Draft, key: str) -> None:
    """Convert the ratio below which a token makes its sequence be left out."""
    correct_rollout(draft, key, {"veto_below": number(draft.get(key))})


def _beside(key: str, name: str) -> str:
    section, dot, _ = key.rpartition(".")
    return section + dot + name


def _bypasses(draft: Draft, key: str) -> bool:
    return draft.get(_beside(key, "bypass_mode")) is True


def _weight_is_in_ratio(draft: Draft, key: str) -> bool:
    return _bypasses(draft, key) and draft.get(_beside(key, "loss_type"), "ppo_clip") == "ppo_clip"


def _bounds(value: Any) -> tuple[float | None, float]:
    """Return the lower bound, if there is one, and the upper one, of a number or a text such as `0.5_5.0`."""
    low, underscore, high = str(value).partition("_")
    try:
        return (float(low), float(high)) if underscore else (None, float(low))
    except ValueError as error:
        raise Unfit(f"{value!r} is neither a number nor two bounds such as 0.5_5.0") from error


# AReaL's section `actor.rejection_sampling`, and what it replaces


def decoupled(draft: Draft, switch: str) -> None:
    """Convert AReaL's decoupled objective, whose weights are masked or clamped in one of several ways."""
    cap, section, moment = "actor.behav_imp_weight_cap", "actor.rejection_sampling.", "actor.m2_threshold"
    draft.recipe[CORRECTION + "weight"] = "token"
    if draft.get(moment) is not None:
        bound = draft.read(moment, number)
        correct_rollout(
            draft, moment, {"mask": "second_moment", "mask_above": bound}, "M2PO's mask, over the mini-batch"
        )
        for key in (cap, *draft.keys(section + "*")):
            draft.unsupported(key, f"there is one mask, and {moment} says which")
    elif draft.keys(section + "*"):
        _rejection(draft, section)
    elif draft.writes(CAP) or draft.writes(MODE):
        _capped(draft, switch)
    elif (most := draft.get(cap)) is not None:
        bounds = {"mask": "token", "mask_above": draft.read(cap, number), "mask_below": 0.0}
        correct_rollout(draft, cap, bounds, f"weights above {most} are left out")
    correct_rollout(draft, switch, {}, "weight=token")


def _capped(draft: Draft, switch: str) -> None:
    """Convert the cap of weights, and what becomes of those above it, in releases before `rejection_sampling`."""
    most = draft.read(CAP, number, 5.0)
    level, _, action = str(draft.get(MODE, "token_mask")).partition("_")
    if level == "disabled":
        del draft.recipe[CORRECTION + "weight"]
        draft.mapped(MODE, CORRECTION + "method", "none")
        for key in (CAP, switch):
            draft.implied(key, f"{MODE} switches the weights off")
        return
    keys: dict[str, Any] = {"weight_cap": most}
    if action == "mask":
        keys = {"mask": "token" if level == "token" else "geometric", "mask_above": most, "mask_below": 0.0}
    note = ", ".join(f"{k}={v}" for k, v in keys.items()) + ("" if level == "token" else TOKENS_WEIGHT)
    for key in (CAP, MODE):
        correct_rollout(draft, key, keys, note)


def _rejection(draft: Draft, section: str) -> None:
    metric = str(draft.get(section + "metric", "ratio")).removeprefix("kl_")
    is_token = draft.get(section + "level", "token") == "token"
    upper = draft.read(section + "upper", number, 5.0)
    lower = None if draft.get(section + "lower") is None else draft.read(section + "lower", number)
    level = "token" if is_token else {"sum": "sequence", "max": "largest"}.get(draft.get(section + "agg"), "geometric")
    keys: dict[str, Any] = {}
    if draft.get(section + "action", "mask") == "clamp":
        keys = {"weight_cap": upper} | ({"weight_floor": lower} if lower else {})
    elif metric == "k1":
        keys = {"mask": level, "mask_above": exp(upper), "mask_below": 0.0 if lower is None else exp(lower)}
    elif metric == "ratio":
        keys = {"mask": level, "mask_above": upper, "mask_below": lower or 0.0}
    elif metric in ("k2", "k3", "binary_kl"):
        keys = {"mask": level, "mask_by": metric, "mask_above": upper}
    is_other_weight = not is_token and metric == "ratio"
    for key in draft.keys(section + "*"):
        if keys:
            note = TOKENS_WEIGHT if is_other_weight else ""
            correct_rollout(draft, key, keys, ", ".join(f"{k}={v}" for k, v in keys.items()) + note)
        draft.unsupported(key, f"the metric {metric!r} is not offered")


# ROLL's section `train_infer_correction`


def of_roll(draft: Draft) -> None:
    """Convert ROLL's importance weights and the first of its filters."""
    section = "train_infer_correction."
    own = section + "is_weight."
    if draft.get(own + "enabled") is True:
        level = str(draft.get(own + "weight_type", "token"))
        if level in ("token", "sequence"):
            cap = draft.get(own + "upper_bound")
            correct_rollout(draft, own + "enabled", {"weight": level})
            draft.implied(own + "weight_type", f"{own}enabled says so")
            if cap is not None:
                draft.mapped(own + "upper_bound", CORRECTION + "weight_cap", draft.read(own + "upper_bound", number))
    first = section + "filters.0."
    if draft.get(first + "enabled") is True:
        _filter(draft, first)
    elif draft.keys(first + "*"):
        for key in draft.keys(first + "*"):
            draft.implied(key, f"{first}enabled is not true")
    for key in draft.keys(section + "*"):
        reason = (
            "there is one mask, by the ratio of token, sequence or geometric mean, and weights by token or sequence"
        )
        draft.unsupported(key, reason)


LEVELS: Mapping[str, str] = {"token": "token", "segment": "turn", "sequence": "sequence", "geometric": "geometric"}
"""Values of `agg_type`, with `mask`."""


def _filter(draft: Draft, section: str) -> None:
    level = LEVELS.get(str(draft.get(section + "agg_type", "token")))
    by_ratio = draft.get(section + "ratio_enabled", True) is True
    by_difference = draft.get(section + "diff_enabled") is True
    if not draft.keys(section + "*") or level is None or not by_ratio:
        return
    low, high = draft.read(section + "ratio_low", number, 0.8), draft.read(section + "ratio_high", number, 1.2)
    keys: dict[str, Any] = {"mask": level, "mask_below": low, "mask_above": high}
    if by_difference:
        keys["difference_below"] = draft.read(section + "diff_low", number, -0.2)
        keys["difference_above"] = draft.read(section + "diff_high", number, 0.2)
    else:
        for name in ("diff_low", "diff_high"):
            draft.implied(section + name, "only diff_enabled reads this")
    for key in draft.keys(section + "*"):
        correct_rollout(draft, key, keys)
