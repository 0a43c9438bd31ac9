"""`fivefold play` shows episodes as they are trained."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fivefold.cli.main import app
from fivefold.play import described
from fivefold.rollout.tokenizer import load_tokenizer
from fivefold.types import Completion, Effort, Episode, Move, Prompt, Trajectory

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
        parts = re.findall(r"^ +(prompt|model|reads) +(\d+)  '(.*)'(?:  \(environment [01]\))?$", episode, flags=re.M)
        assert [kind for kind, _, _ in parts] == ["prompt", *["model", "reads"] * (int(n_turns) - 1), "model"]
        assert all(text in ("<1+2=", ">1+2=", "?1+2=") for kind, _, text in parts if kind == "reads")
    assert play(RECIPE, "-n", "3") == shown
    first = play(RECIPE, "--ids")
    ids = re.findall(r"^ +((?:\d+ ?)+)$", first, flags=re.M)
    sizes = re.findall(r"^ +(?:prompt|model|reads) +(\d+)", first, flags=re.M)
    assert [len(row.split()) for row in ids] == [int(size) for size in sizes]


def test_a_sequence_says_where_it_leaves_an_earlier_one() -> None:
    def sequence(*token_ids: int) -> Trajectory:
        return Trajectory.single_turn(
            Prompt(0, "", token_ids[:-1], None), Completion.of(token_ids[-1:], [0.0], "stop", 0)
        )

    moves = [Move(2, 1, {"won": 0.5}, "a"), Move(5, 1, {}, "b"), Move(10, 1, {"won": 1.0}, "c")]
    made = (sequence(1, 2, 3), sequence(1, 5, 4), sequence(1, 2, 3, 4, 6))
    episode = Episode(made, "parse", {"won": 1.5}, 3, moves, Effort(calls=1))
    tokenizer = load_tokenizer(str(ROOT / "fivefold" / "models" / "tiny-moe"))
    shown = described(tokenizer, Prompt(0, "", (1,), None), episode).splitlines()
    assert shown[0] == "prompt 1: parse after 3 turns; rewards: won 1.5; 1 call of tools"
    heads = [line.partition("; ")[2] for line in shown if "sequence" in line.split()[0]]
    assert heads == ["", "the first 1 are as in sequence 1", "the first 3 are as in sequence 1"]
    assert [line.endswith("(won 0.5)") or line.endswith("(won 1)") for line in shown if " model " in line] == [
        True, False, True,
    ]  # fmt: skip


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
