"""Guess a number by hints, in a range and a number of turns that a row says.

{"extra_info": {"least": 1, "most": 20, "turns": 20, "seed": 3}}
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fivefold.data.files import Row

GUESS = re.compile(r"\\boxed\{(\d+)\}")
NO_GUESS = -0.1
"""Reward of an answer without a number in a box, which ends the game."""


def rows(
    path: str, split: str | None, n: int, seed: int, least: int = 1, most: int = 20, turns: int = 20
) -> Iterator[Row]:
    """Yield a row for each game, as a recipe's `reader`; all samples of a prompt have the same number to guess.

    Args:
        path: the rows' data source; it is no file.
        split: not read.
        n: number of rows.
        seed: seed of the first one; each next one has the next seed.
        least: smallest number, at least 1: 0 is no guess.
        most: largest number.
        turns: most guesses.

    Raises:
        ValueError: a range without a choice, or no turn.
    """
    if not 1 <= least < most or turns < 1:
        raise ValueError(
            f"least={least}, most={most} and turns={turns} make no game: it needs 1 <= least < most and 1 <= turns"
        )
    text = (
        f"Guess a number from {least} to {most} in at most {turns} turns. After a wrong guess you learn whether the "
        r"number is higher or lower. Only the last number in \boxed{} counts as your guess."
    )
    for number in range(n):
        yield {
            "data_source": path,
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"least": least, "most": most, "turns": turns, "seed": seed + number},
        }


class GuessNumber:
    """Each answer has a guess in a box; the reward is 1 for the right one.

    An observation has all hints so far, so that a turn can be a separate chat (`environment.memory: 0`). The game
    ends with -0.1 after an answer without a guess, and after the last turn with 1 less the distance by the range, or 0
    for a guess outside of it.
    """

    def reset(self, extra_info: Mapping[str, Any], seed: int) -> str:
        """Begin the game of the row.

        Args:
            extra_info: as `rows` writes it.
            seed: seed of the episode, for rows without one.
        """
        self._least, self._most = int(extra_info.get("least") or 1), int(extra_info.get("most") or 20)
        self._turns = int(extra_info.get("turns") or 20)
        own = extra_info.get("seed")
        self._number = random.Random(seed if own is None else own).randint(self._least, self._most)
        self._guesses: list[int] = []
        self._hints: list[str] = []
        return self._shown()

    def step(self, move: str) -> tuple[str, float, bool]:
        """Answer a guess; return all hints, the reward, and whether the game is over."""
        found, turn = GUESS.findall(move), len(self._hints) + 1
        guess = int(found[-1]) if found else 0
        if not guess:
            return f"Turn {turn}: there is no guess.", NO_GUESS, True
        is_inside = self._least <= guess <= self._most
        if guess == self._number:
            return f"Turn {turn}: {guess} is right.", 1.0, True
        if not is_inside:
            hint = f"{guess} is outside of the range"
        elif guess in self._guesses:
            hint = f"{guess} was guessed before"
        else:
            hint = f"the number is {'lower' if guess > self._number else 'higher'} than {guess}"
        self._guesses.append(guess)
        self._hints.append(f"Turn {turn}: {hint}.")
        if turn < self._turns:
            return self._shown(), 0.0, False
        nearness = 1 - abs(guess - self._number) / (self._most - self._least)
        return "There are no turns left.", nearness if is_inside else 0.0, True

    def _shown(self) -> str:
        return "\n".join([*self._hints, "Enter your next guess." if self._hints else "Enter your first guess."])
