"""TextArena: its games for one player, which say their rules themselves.

{"prompt": "Play.", "extra_info": {"game": "GuessTheNumber-v0", "options": {"max_turns": 5}}}
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fivefold.environments.others.package import imported
from fivefold.environments.others.row import GameOfRow

textarena = imported("textarena", "textarena")

_LOCK = threading.Lock()
"""Held by the game that draws random numbers now."""


class SinglePlayer:
    """Shows what the game says after each move. Its reward comes with the end."""

    def reset(self, extra_info: Mapping[str, Any], seed: int) -> str:
        """Begin the game of the row, and return its rules.

        Raises:
            ValueError: the row names no game, or TextArena has none of that name.
        """
        game = GameOfRow.of(extra_info, seed)
        self._random_state = random.Random(game.seed).getstate()
        with self._own_random_numbers():
            # Not with the wrappers of its default form, which repeat in each observation all that was said before.
            self._game = textarena.make(f"{game.name}-raw", **game.options)
            self._game.reset(num_players=1, seed=game.seed)
        return self._said()

    def step(self, move: str) -> tuple[str, float, bool]:
        """Give the move to the game, in the brackets that it looks for."""
        with self._own_random_numbers():
            done, _ = self._game.step(move if "[" in move else f"[{move.strip()}]")
        if not done:
            return self._said(), 0.0, False
        rewards, _ = self._game.close()
        return self._said(), float(rewards[0]), True

    def _said(self) -> str:
        """Return what the game has said since the last move, without the move."""
        _, messages = self._game.get_observation()
        texts = [text for _, text, kind in messages if kind is not textarena.ObservationType.PLAYER_ACTION]
        return "".join(f"\n{text.strip()}\n" for text in texts)

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        """Give Python's global generator, from which all these games draw, the state in which this game has left it."""
        with _LOCK:
            outside = random.getstate()
            random.setstate(self._random_state)
            try:
                yield
            finally:
                self._random_state = random.getstate()
                random.setstate(outside)
