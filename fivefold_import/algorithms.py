"""Losses: the names that frameworks give them, and what becomes of the keys that depend on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fivefold.config.methods import LOSSES, Word
from fivefold_import import reasons
from fivefold_import.draft import Draft, Rule

LOSS = "actor.loss"

WORDS: Mapping[str, tuple[str, Word]] = {
    word: (name, how) for name, row in LOSSES.items() for word, how in row.words.items()
}
"""Values of `actor.loss` by the names that frameworks give them, each with what makes it the framework's."""
CLIP_RANGE = ("actor.eps_clip", "actor.eps_clip_higher", "actor.c_clip")
"""The recipe's keys of the clip range."""


def choose_loss(draft: Draft, key: str, name: str) -> None:
    """Map `key`, which asks for the loss `name`; if it is not offered, the keys of the clip range say so at the end."""
    word = name.lower().replace("-", "_")
    if word in WORDS:
        loss, how = WORDS[word]
        for option, value in how.options.items():
            draft.recipe[f"{LOSS}_kwargs.{option}"] = value
        draft.mapped(key, LOSS, loss, how.note)
        return
    draft.unsupported(key, f"the loss {name!r} is not offered; the recipe trains with PPO's clipped loss")
    draft.other_loss = draft.other_loss or f"{key}={draft.get(key)}"


def loss_by_name(*clipped: Any) -> Rule:
    """Map a key that names the loss; the values `clipped` ask for PPO's clipped loss, which is the default."""

    def rule(draft: Draft, source: str) -> None:
        if (value := draft.get(source)) in clipped:
            draft.implied(source, reasons.CLIPPED_LOSS)
        else:
            choose_loss(draft, source, str(value))

    return rule


def loss_switch(name: str) -> Rule:
    """Map a switch that chooses the loss `name`; switched off, the loss is PPO's."""

    def rule(draft: Draft, source: str) -> None:
        if draft.get(source) is False:
            draft.implied(source, reasons.CLIPPED_LOSS)
        else:
            choose_loss(draft, source, name)

    return rule


def settle_clip_range(draft: Draft) -> None:
    """Remove what the chosen loss does not read of the clip range, and what would mean something else."""
    loss = draft.recipe.get(LOSS, "ppo")
    if draft.other_loss:
        for to in CLIP_RANGE:
            draft.demote(to, f"its meaning depends on {draft.other_loss}: set {to} for {reasons.CLIP}")
        return
    reads = LOSSES[loss].reads
    if "c_clip" not in reads:
        draft.demote("actor.c_clip", "only PPO's loss has a dual clip", "implied")
    if "eps_clip" not in reads:
        for to in CLIP_RANGE[:2]:
            draft.demote(to, f"the loss {loss} clips no ratio", "implied")
    elif draft.recipe.get("actor.eps_clip", 0) > 1:
        draft.revise("actor.eps_clip", 1.0, "no ratio is below 0, so 1 is no bound")


def settle_staleness(draft: Draft) -> None:
    """Correct nothing for the age of samples of a truncated distribution, whose log-probs do not compare."""
    recipe = draft.recipe
    truncates = (
        recipe.get("gconfig.top_p", 1) < 1 or recipe.get("gconfig.top_k") or recipe.get("gconfig.min_new_tokens")
    )
    if recipe.get("rollout.max_head_offpolicyness") and truncates and "actor.rollout_correction.method" not in recipe:
        recipe["actor.rollout_correction.method"] = "none"
        draft.notes.append(
            "actor.rollout_correction.method=none: with top_p, top_k or min_new_tokens, the log-probs of older samples "
            "describe a truncated distribution, with which losses cannot be corrected for staleness"
        )
