"""Gymnasium: environments with numbered actions, such as its toy texts, as games that are played in words.

{"prompt": "Cross the lake.", "extra_info": {"game": "FrozenLake-v1", "actions": ["left", "down", "right", "up"]}}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fivefold.environments.others.package import imported
from fivefold.environments.others.row import GameOfRow

gymnasium = imported("gymnasium", "gymnasium")

ACTIONS = {
    "Blackjack": ("stick", "hit"),
    "CliffWalking": ("up", "right", "down", "left"),
    "CliffWalkingSlippery": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
"""Words for the actions of Gymnasium's toy texts, which numbers them only."""
_COLOURED = re.compile("\x1b\\[([\\d;]+)m([^\x1b]*)\x1b\\[0m")
_MARKS = {"34;1": ("(", ")"), "35": ("{", "}")}
"""Marks in place of colours: of the taxi's passenger, and of the place to which it goes."""


class TextGame:
    """Shows each observation as a text, and takes the last action that a move names."""

    def reset(self, extra_info: Mapping[str, Any], seed: int) -> str:
        """Begin the game of the row.

        Raises:
            ValueError: the row names no game, the game's actions are not numbered, or the row has not a word for each.
        """
        game = GameOfRow.of(extra_info, seed)
        self._game = gymnasium.make(game.name, **game.options)
        if "ansi" in (self._game.metadata.get("render_modes") or ()):
            self._game = gymnasium.make(game.name, **{"render_mode": "ansi", **game.options})
        self._actions = _words(game.name, self._game.action_space, extra_info.get("actions"))
        named = "|".join(re.escape(word) for word in sorted(self._actions, key=len, reverse=True))
        self._named = re.compile(rf"(?<!\w)(?:{named})(?!\w)", re.IGNORECASE)
        self._observation, _ = self._game.reset(seed=game.seed)
        return f"{self._shown()}Actions: {', '.join(self._actions)}\n"

    def step(self, move: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Do the last action that the move names. A move without one changes nothing."""
        words = self._named.findall(move)
        if not words:
            return f"\nThat names no action. Actions: {', '.join(self._actions)}\n", 0.0, False, False, {}
        number = self._actions.index(words[-1].lower()) + int(self._game.action_space.start)
        self._observation, reward, terminated, truncated, _ = self._game.step(number)
        return self._shown(), float(reward), terminated, truncated, {}

    def state(self) -> str:
        """Return the observation, for credit by state."""
        return str(self._observation)

    def _shown(self) -> str:
        text = self._game.render() if self._game.render_mode == "ansi" else str(self._observation)
        return "\n" + _without_colours(text).strip("\n") + "\n"


def _words(name: str, space: Any, given: object) -> list[str]:
    """Return a word for each action: as the row says, as it is known, or its number."""
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise ValueError(f"the actions of {name} are {space}: name a game whose actions are Discrete")
    numbers = [str(space.start + index) for index in range(space.n)]
    words = given or ACTIONS.get(name.rpartition("/")[2].partition("-v")[0]) or numbers
    if not isinstance(words, (list, tuple)) or len(words) != len(numbers):
        raise ValueError(f"extra_info.actions={words!r}: {name} has {len(numbers)} actions, and each needs a word")
    return [str(word).lower() for word in words]


def _without_colours(text: str) -> str:
    """Put marks around what is coloured, such as the player's place; colours may be nested."""
    while (marked := _COLOURED.sub(_marked, text)) != text:
        text = marked
    return text


def _marked(found: re.Match[str]) -> str:
    left, right = _MARKS.get(found[1], ("[", "]"))
    return f"{left}{found[2]}{right}"
