"""What games on a board have in common: their symbols, and what a move does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

Place = tuple[int, int]
"""Row and column."""
STEPS: Mapping[str, Place] = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
"""Directions, with the change of row and column."""


class Board(Protocol):
    """A game that is being played."""

    rules: str
    """What the player has to know."""
    symbols: Mapping[str, str]
    """What each symbol of the board stands for."""

    def move(self, direction: str | None) -> tuple[float, bool]:
        """Move into one of `STEPS`, or not at all. Return the reward, and whether the game is over."""

    def rows(self) -> Sequence[str]:
        """Return the rows of the board as symbols."""


def beside(place: Place, direction: str) -> Place:
    """Return the place next to another one."""
    down, right = STEPS[direction]
    return place[0] + down, place[1] + right
