"""Losses that Fivefold does not have: the keys that name them, and the clip range, which they read in another way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.importing import reasons
from fivefold.importing.draft import Draft, Rule

CLIP_RANGE = ("actor.eps_clip", "actor.eps_clip_higher", "actor.c_clip")
"""The recipe's keys that PPO's clipped loss reads."""

LOSSES: Mapping[str, str] = {
    "gspo": "GSPO clips the probability ratio of a whole sequence",
    "sequence": "GSPO clips the probability ratio of a whole sequence",
    "seq": "GSPO clips the probability ratio of a whole sequence",
    "geo_mean": "GMPO clips the geometric mean of a sequence's ratios",
    "cispo": "CISPO clips the weight of each token, and keeps its gradient",
    "sapo": "SAPO damps large ratios smoothly, and clips none",
    "gpg": "GPG takes no ratios",
    "pg": "a plain policy gradient takes no ratios",
    "cpgd": "CPGD clips the logarithm of the ratio, and adds a penalty",
    "m2po": "M2PO masks tokens by the second moment of their ratios",
    "clip_cov": "Clip-Cov leaves tokens out by their covariance",
    "kl_cov": "KL-Cov penalises tokens by their covariance",
    "topr": "TOPR weights samples of a negative advantage",
    "opmd": "OPMD takes no ratios",
}
"""What some losses do, by the names that frameworks give them."""


def other_loss(draft: Draft, key: str, name: str) -> None:
    """Say that `key` asks for the loss `name`, which is not offered; keys of the clip range say so at the end."""
    does = LOSSES.get(name.lower().replace("-", "_"), f"the loss {name!r} is not offered")
    draft.unsupported(key, f"{does}; {reasons.CLIPPED_LOSS}, and the recipe trains with that")
    draft.other_loss = draft.other_loss or f"{key}={draft.get(key)}"


def clipped_loss_only(*accepted: Any, name: str = "") -> Rule:
    """Make the accepted values implied, because they ask for PPO's clipped loss; others ask for another loss.

    Args:
        accepted: values that ask for PPO's clipped loss.
        name: the other loss, where the value does not name it.
    """

    def rule(draft: Draft, source: str) -> None:
        value = draft.get(source)
        if value in accepted:
            draft.implied(source, reasons.CLIPPED_LOSS)
        else:
            other_loss(draft, source, name or str(value))

    return rule


def option_of_loss(switch: str, *clipped: Any) -> Rule:
    """Make an option of another loss implied while the key `switch` has one of the values `clipped`."""

    def rule(draft: Draft, source: str) -> None:
        if draft.get(switch, clipped[0]) in clipped:
            draft.implied(source, f"only another {switch.rpartition('.')[2]} reads this")
        else:
            draft.unsupported(source, f"{switch}={draft.get(switch)} reads this, and {reasons.CLIPPED_LOSS}")

    return rule


def take_back_clip_range(draft: Draft) -> None:
    """Remove the clip range of a source that has another loss: the same number would mean something else."""
    if not draft.other_loss:
        return
    for to in CLIP_RANGE:
        draft.demote(to, f"its meaning depends on {draft.other_loss}: set {to} for {reasons.CLIP}")
