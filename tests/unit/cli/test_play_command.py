"""`fivefold play` shows episodes as they are trained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli.main import app

ROOT = Path(__file__).parents[3]
RECIPE = str(ROOT / "recipes" / "guess-digit.yaml")


def play(*words: str) -> str:
    result = CliRunner().invoke(app, ["play", *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_an_episode_is_shown_turn_by_turn() -> None:
    shown = play(RECIPE, "-n", "3")
    episodes = re.split(r"^(?=prompt \d)", shown, flags=re.M)[1:]
    assert len(episodes) == 3
    for episode in episodes:
        [(ending, n_turns, reward)] = re.findall(r"(\w+) after (\d) turns?; rewards: environment (\d)", episode)
        assert ending == ("done" if reward == "1" else "turns")
        assert f"{n_turns} of them trained" in episode
        parts = re.findall(r"^ +(prompt|model|reads) +(\d+)  '(.*)'$", episode, flags=re.M)
        assert [kind for kind, _, _ in parts] == ["prompt", *["model", "reads"] * (int(n_turns) - 1), "model"]
        assert all(text in ("<1+2=", ">1+2=", "?1+2=") for kind, _, text in parts if kind == "reads")
    assert play(RECIPE, "-n", "3") == shown


def test_a_recipe_without_an_environment_has_one_turn() -> None:
    assert "after 1 turn; rewards: none yet" in play(str(ROOT / "recipes" / "quickstart.yaml"))


def test_a_game_that_fails_is_an_error_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text(
        "class Broken:\n    def reset(self): ...\n    def step(self, move):\n        return self.board[move]\n"
    )
    result = CliRunner().invoke(app, ["play", RECIPE, "environment.game=broken.py:Broken"])
    assert result.exit_code == 2
    assert "return self.board[move]" in result.output
    assert "Traceback" not in result.output
