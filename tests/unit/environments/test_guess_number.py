"""The guessing game: its rows, its hints and its ends."""

from __future__ import annotations

import pytest

from fivefold.config.schema.data import DatasetConfig
from fivefold.data.rows import load_rows
from fivefold.environments.games.guess_number import GuessNumber

READER = {"path": "Guess", "reader": "fivefold.environments.games.guess_number:rows"}
ROW = {"least": 1, "most": 20, "turns": 5, "seed": 3}


def begun() -> tuple[GuessNumber, int]:
    """Return a game, and its number, found by trying all."""

    def is_right(guess: int) -> bool:
        game = GuessNumber()
        game.reset(ROW, seed=0)
        return game.step(rf"\boxed{{{guess}}}")[1] == 1.0

    [number] = filter(is_right, range(1, 21))
    game = GuessNumber()
    assert game.reset(ROW, seed=99) == "Enter your first guess."
    return game, number


def test_halving_the_range_finds_the_number_by_the_hints() -> None:
    game, number = begun()
    low, high, reward, is_over, turn = 1, 20, 0.0, False, 0
    while not is_over:
        turn += 1
        guess = (low + high) // 2
        text, reward, is_over = game.step(rf"Not \boxed{{0}} but \boxed{{{guess}}}.")
        assert text.count("Turn") == (1 if is_over else turn), "an observation has all hints"
        low, high = (guess + 1, high) if f"higher than {guess}" in text else (low, guess - 1)
    assert (reward, guess) == (1.0, number)
    assert turn <= 5


def test_the_last_turn_pays_for_nearness_and_no_guess_ends_the_game() -> None:
    game, number = begun()
    wrong = 20 if number < 11 else 1
    moves = [rf"\boxed{{{guess}}}" for guess in (99, wrong, wrong, wrong)]
    hints = [game.step(move) for move in moves]
    assert [(reward, is_over) for _, reward, is_over in hints] == [(0.0, False)] * 4
    assert "outside" in hints[0][0]
    assert "guessed before" in hints[2][0]
    assert game.step(moves[1])[1:] == (pytest.approx(1 - abs(wrong - number) / 19), True)
    for answer in ("7", r"\boxed{seven}", r"\boxed{0}"):
        assert begun()[0].step(answer)[1:] == (-0.1, True)
    game, _ = begun()
    for _ in range(4):
        game.step(moves[1])
    assert game.step(r"\boxed{99}")[1:] == (0.0, True), "a last guess outside of the range"


def test_rows_are_games_of_following_seeds() -> None:
    config = DatasetConfig.model_validate({**READER, "reader_kwargs": {"n": 50, "seed": 7, "most": 9, "turns": 3}})
    rows = load_rows(config)
    assert "from 1 to 9 in at most 3 turns" in rows[0]["prompt"][0]["content"]
    assert [row["extra_info"]["seed"] for row in rows] == list(range(7, 57))
    numbers = set()
    for row in rows:
        game = GuessNumber()
        game.reset(row["extra_info"], 0)
        numbers.add(game._number)
    assert numbers == set(range(1, 10))
    with pytest.raises(ValueError, match="least=5, most=5 and turns=20 make no game"):
        load_rows(DatasetConfig.model_validate({**READER, "reader_kwargs": {"n": 1, "seed": 7, "least": 5, "most": 5}}))
