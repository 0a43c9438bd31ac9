"""Sokoban: boxes are pushed to targets. A level is made backwards, by pulling boxes away from the targets.

######
#_PX_#
#__O_#
######
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fivefold.environments.games.board import STEPS, Place, beside

STEP, ON_TARGET, OFF_TARGET, SOLVED = -0.1, 1.0, -1.0, 10.0
"""Rewards, as in gym-sokoban: of each move, of a box that comes to a target or leaves one, and of the last box."""
MOST_STATES = 20_000
"""Positions that are looked at for one level."""
MOST_LEVELS = 1_000
"""Levels that are drawn until one can be played."""
Position = tuple[Place, frozenset[Place]]
"""The player's place, and the boxes'."""


@dataclass
class Sokoban:
    """A level with as many boxes as targets."""

    seed: int
    dim_room: Sequence[int] = (10, 10)
    """Rows and columns, walls included."""
    num_boxes: int = 4
    search_depth: int = 300
    """Most moves by which a level is made."""
    symbols: Mapping[str, str] = field(
        default_factory=lambda: {
            "#": "wall",
            "_": "floor",
            "O": "target",
            "√": "box on a target",
            "X": "box",
            "P": "you",
            "S": "you on a target",
        }
    )
    rules: str = field(
        init=False, default="Push all boxes to the targets. You cannot pull a box, or push two boxes or a wall."
    )

    def __post_init__(self) -> None:
        """Make a level.

        Raises:
            ValueError: there is no room for one.
        """
        height, width = self.dim_room
        if height < 4 or width < 4 or self.num_boxes < 1:
            raise ValueError(
                f"a level has at least 4 rows, 4 columns and a box, not dim_room={[*self.dim_room]} and "
                f"num_boxes={self.num_boxes}"
            )
        self._random = np.random.default_rng(self.seed)
        self._player: Place = (0, 0)
        self._boxes: frozenset[Place] = frozenset()
        for _ in range(MOST_LEVELS):
            self._floor = self._dug()
            if len(self._floor) > 2 * self.num_boxes + 1 and self._placed():
                return
        raise ValueError(f"no level with num_boxes={self.num_boxes} was found in dim_room={[*self.dim_room]}: lower it")

    def move(self, direction: str | None) -> tuple[float, bool]:
        """Return the reward, and whether all boxes are on targets; see `Board`."""
        before = len(self._boxes & self._targets)
        if direction is not None:
            ahead = beside(self._player, direction)
            if ahead in self._boxes and self._is_free(behind := beside(ahead, direction)):
                self._boxes = self._boxes - {ahead} | {behind}
            if self._is_free(ahead):
                self._player = ahead
        after = len(self._boxes & self._targets)
        changed = ON_TARGET * max(0, after - before) + OFF_TARGET * max(0, before - after)
        is_solved = after == self.num_boxes
        return STEP + changed + (SOLVED if is_solved else 0.0), is_solved

    def rows(self) -> Sequence[str]:
        """Return the rows of the board as symbols."""
        wall, floor, target, on_target, box, you, you_on_target = self.symbols

        def symbol(place: Place) -> str:
            is_target = place in self._targets
            if place == self._player:
                return you_on_target if is_target else you
            if place in self._boxes:
                return on_target if is_target else box
            return wall if place not in self._floor else target if is_target else floor

        height, width = self.dim_room
        return ["".join(symbol((row, column)) for column in range(width)) for row in range(height)]

    def _is_free(self, place: Place) -> bool:
        return place in self._floor and place not in self._boxes

    def _dug(self) -> set[Place]:
        """Return the floor that a walk has dug, two places wide, inside the outer walls."""
        height, width = self.dim_room
        place = (int(self._random.integers(1, height - 1)), int(self._random.integers(1, width - 1)))
        directions, floor = [*STEPS], set[Place]()
        direction = directions[self._random.integers(4)]
        for _ in range(int(1.7 * (height + width))):
            if self._random.random() < 0.35:
                direction = directions[self._random.integers(4)]
            row, column = beside(place, direction)
            place = (min(max(row, 1), height - 2), min(max(column, 1), width - 2))
            floor |= {place, beside(place, directions[self._random.integers(4)])}
        return {(row, column) for row, column in floor if 0 < row < height - 1 and 0 < column < width - 1}

    def _placed(self) -> bool:
        """Put targets, boxes and the player on the floor; return whether every box could be pulled off its target."""
        places = sorted(self._floor)
        chosen = [places[index] for index in self._random.permutation(len(places))[: self.num_boxes + 1]]
        self._targets = frozenset(chosen[1:])
        found = self._pulled((chosen[0], self._targets))
        if found is None:
            return False
        self._player, self._boxes = found
        for _ in range(self._random.integers(4)):
            free = [ahead for direction in STEPS if self._is_free(ahead := beside(self._player, direction))]
            self._player = free[self._random.integers(len(free))] if free else self._player
        return True

    def _pulled(self, start: Position) -> Position | None:
        """Return a position from which the targets can be reached, with boxes far from all targets; None: no such."""
        seen, waiting, best, most = {start}, deque([(start, 0)]), None, 0
        while waiting and len(seen) < MOST_STATES:
            (player, boxes), depth = waiting.popleft()
            if not boxes & self._targets and (score := self._distance(boxes)) > most:
                best, most = (player, boxes), score
            if depth == self.search_depth:
                continue
            for direction in self._random.permutation([*STEPS]):
                ahead = beside(player, str(direction))
                if ahead not in self._floor or ahead in boxes:
                    continue
                behind = (2 * player[0] - ahead[0], 2 * player[1] - ahead[1])
                pulled = boxes - {behind} | {player} if behind in boxes else boxes
                for position in {(ahead, pulled), (ahead, boxes)} - seen:
                    seen.add(position)
                    waiting.append((position, depth + 1))
        return best

    def _distance(self, boxes: frozenset[Place]) -> int:
        """Return the sum over boxes of the steps to the nearest target, walls aside."""
        return sum(min(abs(row - goal[0]) + abs(column - goal[1]) for goal in self._targets) for row, column in boxes)
