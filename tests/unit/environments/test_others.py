"""Environments of other projects: their games are played, and their problems scored, with the packages themselves."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fivefold.config.load import load_recipe
from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.environments.environment import Task
from fivefold.environments.game import Game, load_game
from fivefold.environments.others.package import imported
from fivefold.environments.others.row import GameOfRow
from fivefold.environments.transcript import transcript_text
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rewards.user_function import load_user_reward
from fivefold.types import Episode, Prompt
from tests.unit.environments.test_agents import tokenizer_of
from tests.unit.environments.test_game import Replies, play
from tests.unit.environments.test_play import Scripted

OTHERS = "fivefold.environments.others"
Step = tuple[str, float, bool]


def played(name: str, extra_info: Mapping[str, Any], moves: list[str], seed: int = 3) -> tuple[str, list[Step]]:
    """Return the opening of a game and what follows each move, in two episodes that are the same."""
    config = EnvironmentConfig(game=f"{OTHERS}.{name}")
    episodes = []
    for _ in range(2):
        game = load_game(config)()
        opening = game.reset(extra_info=extra_info, seed=seed)
        random.random()  # what else draws random numbers changes nothing
        episodes.append((opening, [step_of(game, move) for move in moves]))
    assert episodes[0] == episodes[1]
    return episodes[0]


def step_of(game: Any, move: str) -> Step:
    observation, reward, *ends = game.step(move)
    return observation, reward, any(ends[:2])


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"package no_such is not installed: pip install 'fivefold\[none\]'"):
        imported("no_such", "none")
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, f"{OTHERS}.gymnasium", raising=False)
    with pytest.raises(ValueError, match=r"pip install 'fivefold\[gymnasium\]'"):
        load_game(EnvironmentConfig(game=f"{OTHERS}.gymnasium:TextGame"))


def test_a_row_names_the_game_and_may_fix_its_seed() -> None:
    row = {"game": "Taxi-v4", "options": {"is_rainy": True, "other": None}}
    assert GameOfRow.of(row, 5) == GameOfRow("Taxi-v4", {"is_rainy": True}, 5)
    assert GameOfRow.of({**row, "seed": 0, "options": None}, 5) == GameOfRow("Taxi-v4", {}, 0)
    with pytest.raises(ValueError, match="names no game"):
        GameOfRow.of({}, 5)


class TestGymnasium:
    """Toy texts of Gymnasium."""

    @pytest.fixture(autouse=True)
    def _package(self) -> None:
        pytest.importorskip("gymnasium")

    def test_who_walks_around_the_holes_of_the_lake_wins(self) -> None:
        lake = {"game": "FrozenLake-v1", "options": {"is_slippery": False}}
        moves = ["down", "I go DOWN.", "right", "2", "right, no: down", "right"]
        opening, steps = played("gymnasium:TextGame", lake, moves)
        assert opening == "\n[S]FFF\nFHFH\nFFFH\nHFFG\nActions: left, down, right, up\n"
        assert steps[3] == ("\nThat names no action. Actions: left, down, right, up\n", 0.0, False)
        assert [step[1:] for step in steps] == [(0.0, False)] * 5 + [(0.0, False)]
        assert steps[-1][0].endswith("FHFH\nFFFH\nHF[F]G\n")

    def test_the_last_step_gives_the_reward(self) -> None:
        lake = {"game": "FrozenLake-v1", "options": {"is_slippery": False, "desc": ["SG"]}}
        _, [step] = played("gymnasium:TextGame", lake, ["right"])
        assert step == ("\n  (Right)\nS[G]\n", 1.0, True)

    def test_seeds_decide_where_the_taxi_is_and_marks_show_it(self) -> None:
        taxi = {"game": "Taxi-v4"}
        openings = {played("gymnasium:TextGame", taxi, [], seed)[0] for seed in range(6)}
        assert len(openings) > 3
        assert all("(" in text and "{" in text and "[" in text for text in openings)
        fixed = {played("gymnasium:TextGame", {**taxi, "seed": 1}, [], seed)[0] for seed in range(3)}
        assert len(fixed) == 1

    def test_blackjack_has_no_picture_and_ends(self) -> None:
        opening, steps = played("gymnasium:TextGame", {"game": "Blackjack-v1"}, ["stick"])
        assert opening.startswith("\n(")
        assert opening.endswith(")\nActions: stick, hit\n")
        assert steps[0][1] in (-1.0, 0.0, 1.0)
        assert steps[0][2]

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"game": "Taxi-v4", "actions": ["left", "right"]}, "Taxi-v4 has 6 actions, and each needs a word"),
            ({"game": "Pendulum-v1"}, "the actions of Pendulum-v1 are Box"),
        ],
    )
    def test_what_words_cannot_play_is_refused(self, row: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            played("gymnasium:TextGame", row, [])
