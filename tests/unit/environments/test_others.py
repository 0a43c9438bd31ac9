"""Environments of other projects: their games are played, and their problems scored, with the packages themselves."""

from __future__ import annotations

import json
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fivefold.config.schema.data import DatasetConfig
from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.data.rows import load_rows
from fivefold.environments.agents.agent import Agent
from fivefold.environments.game import Game, load_game
from fivefold.environments.others.package import imported
from fivefold.environments.others.row import GameOfRow
from fivefold.environments.play import Player
from fivefold.rewards.user_function import load_user_reward
from fivefold.types import Episode
from tests.unit.environments.test_agents import CHATML, Policy, task
from tests.unit.environments.test_play import played as episodes_of

TASKSET = """
import verifiers.v1 as vf
__all__ = ["Sums"]

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

class Config(vf.TasksetConfig):
    most: int = 5

class Sums(vf.Taskset[SumTask, Config]):
    def load(self):
        for n in range(self.config.most):
            yield SumTask(SumData(prompt=f"{n}+{n}?", answer=str(2 * n)), self.config.task)
"""
HARNESS = """
import httpx
import verifiers.v1 as vf
__all__ = ["Twice"]

class Twice(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=None) as client:
            for question in ("Sure?", "Done?"):
                body = {"model": ctx.model, "messages": messages}
                reply = (await client.post(f"{endpoint}/chat/completions", json=body)).raise_for_status().json()
                messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
                messages.append({"role": "user", "content": question})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
"""
OTHERS = "fivefold.environments.others"
Step = tuple[str, float, bool]


def played(name: str, row: Mapping[str, Any], moves: list[str], seed: int = 3) -> tuple[str, list[Step]]:
    """Return the opening of a game and what follows each move, in two episodes that are the same."""
    first, again = (episode(name, row, moves, seed) for _ in range(2))
    assert first == again
    return first


def episode(name: str, row: Mapping[str, Any], moves: list[str], seed: int) -> tuple[str, list[Step]]:
    game = load_game(EnvironmentConfig(game=f"{OTHERS}.{name}"))()
    return game.reset(extra_info=row, seed=seed), [step_of(game, move) for move in moves]


def step_of(game: Any, move: str) -> Step:
    observation, reward, *ends = game.step(move)
    return observation, reward, any(ends[:2])


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no_such cannot be imported \(No module.*\): pip install 'fivefold\[none\]'"):
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
        moves = ["down", "I go DOWN.", "right", "2", "right, no: down", "right", "right"]
        opening, steps = played("gymnasium:TextGame", lake, moves)
        assert opening == "\n[S]FFF\nFHFH\nFFFH\nHFFG\nActions: left, down, right, up\n"
        assert steps[3] == ("\nThat names no action. Actions: left, down, right, up\n", 0.0, False)
        assert [step[1:] for step in steps[:-1]] == [(0.0, False)] * 6
        assert steps[-1] == ("\n  (Right)\nSFFF\nFHFH\nFFFH\nHFF[G]\n", 1.0, True)

    def test_an_episode_is_one_text_of_moves_and_boards(self) -> None:
        moves = ["right", "I do not know", "right"]
        row = {"game": "FrozenLake-v1", "options": {"is_slippery": False, "desc": ["SFG"]}}
        one = task("Cross.\n")
        config = EnvironmentConfig(game=f"{OTHERS}.gymnasium:TextGame", max_turns=5)
        player = Player(Policy(lambda text: moves.pop(0), is_cut=True), Game(config, CHATML))
        player.begin(0, [replace(one, prompt=replace(one.prompt, extra_info=row))])
        [episode] = episodes_of(player)[0]
        assert (episode.rewards, episode.finish_reason, episode.n_turns) == ({"environment": 1.0}, "done", 3)
        actions = "Actions: left, down, right, up\n"
        text = CHATML.decode(episode.trajectories[0].tokens_T.tolist())
        assert text == (
            f"Cross.\n\n[S]FG\n{actions}right\n  (Right)\nS[F]G\nI do not know\nThat names no action. {actions}right"
        )
        assert [move.state for move in episode.moves] == ["0", "1", "1"]

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


class TestTextArena:
    """Games of TextArena that need no download."""

    @pytest.fixture(autouse=True)
    def _package(self) -> None:
        pytest.importorskip("textarena")

    @pytest.mark.parametrize(
        ("game", "move"),
        [
            ("FrozenLake-v0", "down"),
            ("GuessTheNumber-v0", "7"),
            ("Mastermind-v0", "1 2 3 4"),
            ("Minesweeper-v0", "[3 3]"),
            ("Sudoku-v0", "[1 1 1]"),
            ("TowerOfHanoi-v0", "A C"),
        ],
    )
    def test_a_game_says_its_rules_and_answers_a_wrong_move(self, game: str, move: str) -> None:
        opening, [wrong, right] = played("textarena:SinglePlayer", {"game": game}, ["I do not know", move])
        assert len(opening) > 200
        assert "invalid move" in wrong[0]
        assert wrong[1:] == (0.0, False)
        assert right[0] != wrong[0]
        assert "I do not know" not in wrong[0]
        assert opening not in right[0]

    def test_who_halves_what_is_left_finds_the_number(self) -> None:
        row = {"game": "GuessTheNumber-v0", "options": {"min_number": 1, "max_number": 15}}
        for seed in range(5):
            low, high, moves = 1, 15, list[str]()
            for _ in range(4):
                middle = (low + high) // 2
                moves.append(str(middle))
                _, steps = played("textarena:SinglePlayer", row, moves, seed)
                hint, reward, done = steps[-1]
                if done:
                    break
                low, high = (middle + 1, high) if "higher" in hint else (low, middle - 1)
            assert (reward, done) == (1.0, True)

    def test_games_at_the_same_time_draw_their_own_random_numbers(self) -> None:
        row = {"game": "2048-v0"}
        moves = [f"[{move}]" for move in ("up", "left", "down", "right") * 5]
        alone = [played("textarena:SinglePlayer", row, moves, seed) for seed in range(8)]
        assert alone[0] != alone[1]
        before = random.getstate()
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda seed: episode("textarena:SinglePlayer", row, moves, seed), range(8)))
        assert together == alone
        assert random.getstate() == before

    @pytest.mark.parametrize(
        ("game", "message"),
        [("NoSuch-v0", "NoSuch-v0-raw not found"), ("TicTacToe-v0", "number of players has to be 2")],
    )
    def test_a_game_that_one_player_cannot_play_is_refused(self, game: str, message: str) -> None:
        with pytest.raises((ValueError, AssertionError), match=message):
            played("textarena:SinglePlayer", {"game": game}, [])


class TestReasoningGym:
    """Problems and scores of reasoning-gym."""

    @pytest.fixture(autouse=True)
    def _package(self) -> None:
        pytest.importorskip("reasoning_gym")

    def test_rows_are_the_same_for_a_seed_and_score_their_answers(self) -> None:
        from fivefold.environments.others.reasoning_gym import rows

        reward = load_user_reward(f"{OTHERS}.reasoning_gym:score", {})
        for dataset, options in (("leg_counting", {"max_animals": 4}), ("basic_arithmetic", {}), ("mini_sudoku", {})):
            made = list(rows(dataset, 4, seed=1, **options))
            assert made == list(rows(dataset, 4, seed=1, **options))
            assert made != list(rows(dataset, 4, seed=9, **options))
            for row in map(json.loads, map(json.dumps, made)):
                truth = row["reward_model"]["ground_truth"]
                of = {"data_source": row["data_source"], "extra_info": row["extra_info"]}
                assert row["prompt"][0]["content"].endswith("between <answer> and </answer>.")
                assert reward(f"Or <answer>hm</answer>? No: <answer> {truth} </answer>", truth, **of) == 1.0
                assert reward(f"<answer>{truth}</answer> <answer>no</answer>", truth, **of) == pytest.approx(0, abs=0.1)
                assert reward(truth, truth, **of) == 0.0

    def test_an_answer_that_a_data_set_cannot_read_earns_nothing(self) -> None:
        from fivefold.environments.others.reasoning_gym import rows, score

        [row] = rows("prime_factorization", 1, seed=1)
        assert score("<answer>2 x two</answer>", "", data_source="", extra_info=row["extra_info"]) == 0.0

    def test_a_recipe_reads_problems_and_finds_their_answers_in_boxes(self) -> None:
        from fivefold.environments.others.reasoning_gym import last_box, rows

        options = {"reader": f"{OTHERS}.reasoning_gym:read", "reader_kwargs": {"n": 3, "seed": 5}}
        read = load_rows(DatasetConfig.model_validate({"path": "leg_counting", **options}))
        assert [row["prompt"].strip() for row in read] == [
            row["prompt"][0]["content"].removesuffix("Write the final answer between <answer> and </answer>.").strip()
            for row in rows("leg_counting", 3, seed=5)
        ]
        reward = load_user_reward(f"{OTHERS}.reasoning_gym:score", {"boxed": True})
        truth = read[0]["reward_model"]["ground_truth"]
        of = {"data_source": "", "extra_info": read[0]["extra_info"]}
        assert reward(rf"\boxed{{0}}, no: \boxed{{{truth}}}", truth, **of) == 1.0
        assert reward(f"<answer>{truth}</answer>", truth, **of) == 0.0
        assert [last_box(text) for text in (r"\boxed{\frac{1}{2}} }", r"\boxed{1", "1")] == [r"\frac{1}{2}", None, None]

    def test_a_data_set_that_json_cannot_keep_is_refused(self) -> None:
        from fivefold.environments.others.reasoning_gym import rows

        with pytest.raises(ValueError, match="'no_such' not registered"):
            next(rows("no_such", 1, seed=1))
        with pytest.raises(ValueError, match="rearc scores by tuples"):
            next(rows("rearc", 1, seed=1))


class TestVerifiers:
    """Tasks of verifiers, by a harness that needs no network."""

    @pytest.fixture(autouse=True)
    def _package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("verifiers.v1")
        (tmp_path / "sums_taskset.py").write_text(TASKSET)
        (tmp_path / "twice_harness.py").write_text(HARNESS)
        monkeypatch.syspath_prepend(tmp_path)

    def test_tasks_run_at_the_same_time_and_each_is_one_sequence(self) -> None:
        made = self.rows(most=4)
        assert [row["prompt"] for row in made] == ["0+0?", "1+1?", "2+2?", "3+3?"]
        episodes = self.run(made, max_turns=2)
        assert [episode.rewards for episode in episodes] == [{"right": 2.0 * (n == 2)} for n in range(4)]
        for episode in episodes:
            [trajectory] = episode.trajectories
            assert trajectory.mask_T.sum() == 4  # two answers of a token, each with its end
            assert "Sure?" in CHATML.decode(trajectory.tokens_T.tolist())

    def test_a_harness_that_has_no_turn_left_has_failed(self) -> None:
        [episode] = self.run(self.rows(most=1), max_turns=1)
        assert (episode.finish_reason, episode.rewards) == ("turns", {"environment": 0.0})

    def rows(self, **options: Any) -> list[dict[str, Any]]:
        from fivefold.environments.others.verifiers import rows

        return list(map(json.loads, map(json.dumps, rows("sums_taskset", 9, harness="twice_harness", **options))))

    def run(self, made: list[dict[str, Any]], max_turns: int) -> list[Episode]:
        config = EnvironmentConfig(agent=f"{OTHERS}.verifiers:solve", max_turns=max_turns)
        player = Player(Policy(lambda text: "4"), Agent(config, CHATML))
        begun = [task(row["prompt"]) for row in made]
        rows_of = zip(begun, made, strict=True)
        player.begin(
            0, [replace(one, prompt=replace(one.prompt, extra_info=row["extra_info"])) for one, row in rows_of]
        )
        return episodes_of(player)[0]


class TestOpenEnv:
    """An environment behind OpenEnv's server, in a thread of this process."""

    @pytest.fixture(scope="class")
    def address(self) -> Iterator[str]:
        pytest.importorskip("openenv.core", exc_type=ImportError)
        import uvicorn

        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(guessing_app(), log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(10)

    def test_moves_are_actions_and_what_is_none_is_answered(self, address: str) -> None:
        row = {"game": address, "options": {"most": 5}, "move_key": "number", "text_key": "text"}
        opening, steps = played("openenv:RemoteGame", row, ["1", "one", " 4\n"], seed=3)
        assert opening == "\nUp to 5.\n"
        invalid = "\nThat is no action of this environment.\n"
        assert steps == [("\nmore\n", -0.5, False), (invalid, 0.0, False), ("\n\n", 1.0, True)]

    def test_without_keys_moves_and_observations_are_json(self, address: str) -> None:
        opening, steps = played("openenv:RemoteGame", {"game": address}, ["one", "[1]", '{"number": 1}'], seed=3)
        assert json.loads(opening)["text"] == "Up to 9."
        assert steps[0][0].startswith("\nThat is no action: Expecting value")
        assert steps[1] == ("\nThat is no action: write an object in JSON\n", 0.0, False)
        assert json.loads(steps[2][0])["text"] == "more"

    def test_a_session_ends_with_its_episode(self, address: str) -> None:
        for seed in range(12):  # more than the server has sessions; a moment later one is free again
            for _ in range(50):
                try:
                    episode("openenv:RemoteGame", {"game": address}, [], seed)
                except (ConnectionError, RuntimeError):
                    time.sleep(0.1)
                else:
                    break
            else:
                pytest.fail("no session is free")


def guessing_app() -> Any:
    from openenv.core import env_server

    class Guess(env_server.Action):  # type: ignore[name-defined]
        number: int

    class Hint(env_server.Observation):  # type: ignore[name-defined]
        text: str

    class Guessing(env_server.Environment):  # type: ignore[name-defined]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int, episode_id: str | None = None, most: int = 9) -> Hint:
            self._number = seed % most + 1
            return Hint(text=f"Up to {most}.")

        def step(self, action: Guess, **kwargs: Any) -> Hint:
            if action.number == self._number:
                return Hint(text="", done=True, reward=1.0)
            return Hint(text="more" if action.number < self._number else "less", reward=-0.5)

        @property
        def state(self) -> Any:
            return env_server.State()

    return env_server.create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=4)
