"""Agents: what sources say about episodes of several turns.

Their limits are converted. What plays them is a framework's own class, so that the recipe has `???` under one of
`environment.game`, `.tools` and `.agent`, and `fivefold train` refuses it until the user's own is named there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from fivefold.config.source import MISSING
from fivefold_import import reasons
from fivefold_import.draft import Draft

Player = Literal["game", "tools", "agent"]
"""What plays an episode: a key of `environment`."""

MAX_TURNS, MAX_LENGTH = "environment.max_turns", "environment.max_length"
TO_WRITE: Mapping[Player, str] = {
    "game": reasons.WRITE_GAME,
    "tools": reasons.WRITE_TOOLS,
    "agent": reasons.WRITE_AGENT,
}
SINGLE: Mapping[str, str] = {
    "actor.overlong_reward_penalty": "it is for single completions: take it off in the reward of the episode",
    "actor.overlong_tokens": "only overlong_reward_penalty reads this",
    "actor.overlong_penalty_factor": "only overlong_reward_penalty reads this",
}
"""Keys that recipes with an environment refuse, and why."""


def player(draft: Draft) -> Player | None:
    """Return what plays the recipe's episodes; None if each prompt gets one completion."""
    return next((one for one in TO_WRITE if f"environment.{one}" in draft.recipe), None)


def has_turns(draft: Draft, *_: str) -> bool:
    """Return whether the recipe's episodes have several turns."""
    return player(draft) is not None


def leave_open(draft: Draft, one: Player) -> None:
    """Leave the recipe's `environment.<one>` to the user."""
    draft.recipe[f"environment.{one}"] = MISSING


def limit_turns(draft: Draft, limits: Mapping[str, int], length: int | None, framework: str) -> None:
    """Convert the most turns of an episode.

    Args:
        draft: the conversion.
        limits: completions of an episode by the source's key that limits them; the smallest number counts.
        length: the most tokens of an episode, which limits its turns if nothing else does.
        framework: the framework's name.
    """
    if not limits:
        if length is not None:
            draft.recipe[MAX_TURNS] = length
            draft.notes.append(f"{MAX_TURNS}={length}, as many as tokens: {framework} limits the tokens of an episode")
        return
    limit(draft, MAX_TURNS, limits, "ends an episode before", changed="completions of the model")


def limit(draft: Draft, to: str, limits: Mapping[str, int], effect: str, *, note: str = "", changed: str = "") -> None:
    """Convert several limits of the same thing; the smallest counts.

    Args:
        draft: the conversion.
        to: the recipe's key.
        limits: the limits by the source's key.
        effect: what the report says that the smallest one does, of the others.
        note: what it says of the smallest one.
        changed: what it says besides if that is another number than the source's.
    """
    least = draft.recipe[to] = min(limits.values())
    for key, value in limits.items():
        if value == least:
            draft.mapped(key, to, least, note if draft.get(key) == least else changed)
        draft.implied(key, f"{to}={least} {effect}")


def limit_length(draft: Draft, length: int | None, why: str) -> None:
    """Set the most tokens of an episode, and note where they come from."""
    if length is not None:
        draft.recipe[MAX_LENGTH] = length
        draft.notes.append(f"{MAX_LENGTH}={length}: {why}")


def complete(draft: Draft) -> None:
    """Let a game or an agent give the rewards, and note what to write if no key of the source has said it."""
    one = player(draft)
    if one is None:
        return
    is_open = draft.recipe[f"environment.{one}"] == MISSING
    if is_open and not any(entry.note == TO_WRITE[one] for entry in draft.entries):
        draft.notes.append(f"environment.{one}: no key of the source names what plays the episodes: {TO_WRITE[one]}")
    _drop_single(draft)
    if one == "tools":
        return
    for key in [key for key in draft.recipe if key.startswith("reward.")]:
        draft.demote(key, f"the reward is what environment.{one} gives: call your reward there (docs/agents.md)")
    draft.recipe["reward.fn"] = "environment"
    draft.notes.append(f"reward.fn=environment: environment.{one} gives the reward of an episode")


def _drop_single(draft: Draft) -> None:
    """Remove what is for single completions, and what recipes with an environment refuse."""
    for key, reason in SINGLE.items():
        draft.demote(key, reason)
    if draft.recipe.get("actor.advantage") == "remax":
        draft.demote("actor.advantage", "remax compares with a greedy completion: GRPO compares episodes in its place")


# Rules, for the tables


def by_hand(draft: Draft, source: str) -> None:
    """Say what to write in the place of a framework's own class that plays the episodes."""
    one = player(draft)
    if one is None or draft.get(source) in (None, "", {}, []):
        draft.implied(source, reasons.ONE_COMPLETION)
    else:
        draft.unsupported(source, TO_WRITE[one])


def discount_of_turns(draft: Draft, source: str) -> None:
    """Convert the discount of the reward over turns; at 1 all turns have the episode's reward."""
    discount = draft.get(source)
    if discount == 1 or not has_turns(draft):
        draft.implied(source, reasons.SAME_TURNS)
    else:
        draft.recipe["actor.credit"] = "turn"
        draft.mapped(source, "actor.turn_discount", discount, "with actor.credit=turn")
