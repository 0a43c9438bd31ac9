"""FrozenLake and Sokoban as games that are played in words; a row of the data says which.

{"extra_info": {"game": "sokoban", "options": {"dim_room": [6, 6], "num_boxes": 1}, "format_penalty": -0.1, "seed": 3}}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from fivefold.environments.games.board import STEPS, Board
from fivefold.environments.games.frozen_lake import FrozenLake
from fivefold.environments.games.sokoban import Sokoban
from fivefold.environments.others.row import GameOfRow

GAMES: Mapping[str, Callable[..., Board]] = {"frozen_lake": FrozenLake, "sokoban": Sokoban}
MOVE = "<answer>(.*?)</answer>"
"""Regular expression that finds the move in an answer."""
DIRECTIONS = {direction.lower(): direction for direction in STEPS}


def board_of(name: str, options: Mapping[str, Any], seed: int) -> Board:
    """Return a new board.

    Raises:
        ValueError: there is no such game, or it has not these options.
    """
    if name not in GAMES:
        raise ValueError(f"extra_info.game={name!r} is none of {', '.join(GAMES)}")
    try:
        return GAMES[name](seed=seed, **options)
    except TypeError as error:
        raise ValueError(f"the game {name} cannot be made with options={dict(options)}: {error}") from error


def told(board: Board) -> str:
    """Return the rules of a game for its player."""
    symbols = ", ".join(f"{symbol} {meaning}" for symbol, meaning in board.symbols.items())
    return (
        f"{board.rules}\nSymbols: {symbols}\nMoves: {', '.join(STEPS)}\n"
        "Answer with one move, such as <answer>Right</answer>."
    )


class GridGame:
    """Shows the board, and takes the move that an answer has in its tags."""

    def reset(self, extra_info: Mapping[str, Any], seed: int) -> str:
        """Begin the game of the row, and return its board.

        Args:
            extra_info: `game`, a name of `GAMES`; `options`, its fields; `seed`; `move_pattern`, the regular expression
                that finds the move, in its last group; `format_penalty`, the reward of an answer without a move, in
                addition to what standing still gets.
            seed: seed of the episode, for rows without one.

        Raises:
            ValueError: there is no such game, or it has not these options.
        """
        game = GameOfRow.of(extra_info, seed)
        self._board = board_of(game.name, game.options, game.seed)
        self._pattern = re.compile(extra_info.get("move_pattern") or MOVE, re.DOTALL)
        self._penalty = float(extra_info.get("format_penalty") or 0.0)
        return self.state()

    def step(self, move: str) -> tuple[str, float, bool]:
        """Move, and return the board, the reward, and whether the game is over."""
        found = self._pattern.search(move)
        direction = DIRECTIONS.get((found.groups() or (found[0],))[-1].strip().lower()) if found else None
        reward, is_over = self._board.move(direction)
        return self.state(), reward if direction else reward + self._penalty, is_over

    def state(self) -> str:
        """Return the board."""
        return "\n".join(self._board.rows())
