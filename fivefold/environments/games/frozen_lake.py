"""FrozenLake: a way over ice with holes, as in Gymnasium's game, but with start and goal anywhere.

P _ _ _
_ O _ _
_ _ _ G
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fivefold.environments.games.board import STEPS, Place, beside

SIDEWAYS: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("Up", "Down"), ("Left", "Right")),
    **dict.fromkeys(("Left", "Right"), ("Up", "Down")),
}


@dataclass
class FrozenLake:
    """1 for the goal, and 0 for everything else; a hole ends the game."""

    seed: int
    size: int = 4
    """Rows and columns."""
    p: float = 0.8
    """Chance of a place to be ice."""
    is_slippery: bool = True
    """Whether a move goes into either direction at right angles as often as into its own."""
    symbols: Mapping[str, str] = field(
        default_factory=lambda: {
            "P": "you",
            "_": "ice",
            "O": "hole",
            "G": "goal",
            "X": "you in a hole",
            "√": "you at the goal",
        }
    )
    rules: str = field(init=False, default="Cross the frozen lake to the goal, and keep out of the holes.")

    def __post_init__(self) -> None:
        """Draw a lake with a way.

        Raises:
            ValueError: there can be none.
        """
        if self.size < 2 or not 0 < self.p <= 1:
            raise ValueError(f"a lake has a size of at least 2 and a p above 0, not size={self.size} and p={self.p}")
        self._random = np.random.default_rng(self.seed)
        if self.is_slippery:
            self.rules += " The ice is slippery: you may slide sideways."
        while True:
            ice = self._random.random((self.size, self.size)) < self.p
            self._place, self._goal = (self._drawn(), self._drawn())
            self._ice = {(int(row), int(column)) for row, column in np.argwhere(ice)} | {self._place, self._goal}
            if self._place != self._goal and self._has_way():
                break

    def move(self, direction: str | None) -> tuple[float, bool]:
        """Return the reward, and whether the game is over; see `Board`."""
        if direction is not None:
            if self.is_slippery:
                direction = (direction, *SIDEWAYS[direction])[self._random.integers(3)]
            row, column = beside(self._place, direction)
            self._place = (min(max(row, 0), self.size - 1), min(max(column, 0), self.size - 1))
        is_goal = self._place == self._goal
        return float(is_goal), is_goal or self._place not in self._ice

    def rows(self) -> Sequence[str]:
        """Return the rows of the board as symbols."""
        you, ice, hole, goal, in_hole, at_goal = self.symbols
        here = at_goal if self._place == self._goal else you if self._place in self._ice else in_hole

        def symbol(place: Place) -> str:
            if place == self._place:
                return here
            return goal if place == self._goal else ice if place in self._ice else hole

        return ["".join(symbol((row, column)) for column in range(self.size)) for row in range(self.size)]

    def _drawn(self) -> Place:
        row, column = self._random.integers(self.size, size=2)
        return int(row), int(column)

    def _has_way(self) -> bool:
        found, waiting = {self._place}, [self._place]
        while waiting:
            place = waiting.pop()
            new = {beside(place, direction) for direction in STEPS} & self._ice - found
            found |= new
            waiting += new
        return self._goal in found
