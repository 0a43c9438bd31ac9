"""Games of a user's class: their tokens, rewards and ends, and what goes wrong in them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.config.load import load_recipe
from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.environments import game as game_module
from fivefold.environments.environment import Environment, Task
from fivefold.environments.failing import Failing
from fivefold.environments.game import Game, load_game
from fivefold.environments.guess_digit import GuessDigit
from fivefold.environments.play import Player
from fivefold.environments.transcript import Transcript, transcript_text
from fivefold.environments.user_code import EnvironmentFailed
from fivefold.rollout.protocol import GenerationRequest, SamplingParams
from fivefold.rollout.tokenizer import load_tokenizer
from fivefold.types import NOT_SAMPLED, UNKNOWN_EXPERT, Completion, Episode, Prompt
from tests.unit.environments.test_play import Scripted, played

ROOT = Path(__file__).parents[3]
TOKENIZER = load_tokenizer(str(ROOT / "fivefold" / "models" / "tiny-moe"))


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


class Replies(Scripted):
    """An engine that gives the text that `answer` returns for the text so far, and ends with it."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        super().__init__()
        self._answer = answer
        self.limits: list[int] = []

    def submit(self, number: int, request: GenerationRequest, sampling: SamplingParams) -> None:
        super().submit(number, request, sampling)
        self.limits.append(sampling.max_new_tokens)

    def collect(self, seconds: float) -> list[tuple[int, Completion]]:
        number = min(self.running)
        request = self.running.pop(number)
        tokens = ids(self._answer(TOKENIZER.decode(list(request.token_ids))))
        return [(number, Completion.of(tokens, [-0.5] * len(tokens), "length", 3))]


def task(answer: str, seed: int = 0, prompt: str = "1+2=", most: int = 1) -> Task:
    sampling = SamplingParams(most, 0, False, 1.0, 1.0, 0, (), ())
    row = Prompt(int(answer), prompt, tuple(ids(prompt)), answer, "digits", {"level": 2})
    return Task(row, GenerationRequest(row.token_ids, seed), sampling)


def config(**fields: Any) -> EnvironmentConfig:
    values = {"game": "fivefold.environments.guess_digit:GuessDigit", "max_turns": 3, "max_length": 24}
    return EnvironmentConfig(**{**values, **fields})


@pytest.fixture
def game(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Game]:
    """(class, fields of the section) -> the environment that plays it."""

    def build(kind: type, **fields: Any) -> Game:
        monkeypatch.setattr(game_module, "load_game", lambda _: kind)
        return Game(config(**fields), TOKENIZER)

    return build


def play(environment: Environment, engine: Replies, *tasks: Task) -> list[Episode]:
    player = Player(engine, environment)
    player.begin(0, tasks)
    return played(player)[0]


def halving(text: str) -> str:
    """Guess the middle of what the hints have left."""
    low, high = 1, 9
    for guess, sign in zip(text[4::6], text[5::6], strict=False):
        low, high = (low, int(guess) - 1) if sign == "<" else (int(guess) + 1, high)
    return str((low + high) // 2)


def test_the_best_player_is_right_in_seven_of_nine_games_and_its_tokens_are_as_they_were_sampled() -> None:
    engine = Replies(halving)
    episodes = play(Game(config(), TOKENIZER), engine, *(task(str(digit)) for digit in range(1, 10)))
    assert [episode.rewards["environment"] for episode in episodes] == [1, 1, 1, 0, 1, 1, 1, 1, 0]
    assert [episode.finish_reason for episode in episodes].count("turns") == 2
    assert [episode.n_turns for episode in episodes] == [3, 2, 3, 3, 1, 3, 2, 3, 3]
    [trajectory] = episodes[3].trajectories  # the digit is 4
    assert TOKENIZER.decode(trajectory.tokens_T.tolist()) == "1+2=5<1+2=2>1+2=3"
    sampled = np.isin(np.arange(17), [4, 10, 16])
    np.testing.assert_array_equal(trajectory.mask_T, sampled)
    np.testing.assert_array_equal(trajectory.versions_T, np.where(sampled, 3, NOT_SAMPLED))
    np.testing.assert_array_equal(trajectory.logprobs_T, np.where(sampled, -0.5, 0.0).astype(np.float32))
    assert transcript_text(TOKENIZER, episodes[3]) == "5⟦<1+2=⟧2⟦>1+2=⟧3"
    assert transcript_text(TOKENIZER, episodes[4]) == "5"


def test_a_transcript_is_what_a_loop_over_its_tokens_writes() -> None:
    random_numbers = random.Random(5)
    for _ in range(50):
        tokens, mask, logprobs, versions, routes = [7, 8], [0, 0], [0.0, 0.0], [-1, -1], [[[UNKNOWN_EXPERT]]] * 2
        transcript = Transcript(tokens)
        has_routes = random_numbers.random() < 0.5
        for turn in range(random_numbers.randint(1, 4)):
            if turn:
                given = [random_numbers.randrange(50) for _ in range(random_numbers.randrange(3))]
                transcript.given(given)
                for token in given:
                    tokens.append(token), mask.append(0), logprobs.append(0.0), versions.append(-1)
                    routes.append([[UNKNOWN_EXPERT]])
            # All that comes before the last sampled token is computed in the turn, if it was not before.
            new = [random_numbers.randrange(50) for _ in range(random_numbers.randint(1, 4))]
            experts = np.array([*([[turn]] for _ in [*tokens, *new[:-1]]), [[UNKNOWN_EXPERT]]], np.int16)
            values = [-float(token) for token in new]
            completion = Completion(
                np.array(new, np.int32), np.array(values, np.float32), np.full(len(new), turn, np.int32), "stop",
                experts if has_routes else None,
            )  # fmt: skip
            transcript.sampled(completion)
            for token, value in zip(new, values, strict=True):
                tokens.append(token), mask.append(1), logprobs.append(value), versions.append(turn)
                routes.append([[UNKNOWN_EXPERT]])
            routes[:-1] = [[[turn]] if row == [[UNKNOWN_EXPERT]] else row for row in routes[:-1]]
        assert list(transcript.token_ids) == tokens
        transcript.given([1, 2])  # nothing is sampled after it
        made = transcript.trajectory()
        assert made.tokens_T.tolist() == tokens
        assert made.mask_T.tolist() == mask
        assert made.logprobs_T.tolist() == logprobs
        assert made.versions_T.tolist() == versions
        assert (made.routes_TLK.tolist() if made.routes_TLK is not None else None) == (routes if has_routes else None)


def test_an_episode_ends_where_it_has_no_room_and_the_last_turn_has_what_is_left(game: Callable[..., Game]) -> None:
    engine = Replies(lambda text: "11")
    [episode] = play(game(Endless, max_turns=8, max_length=14), engine, task("1", most=3))
    # 4 tokens, then turns of two with answers of three between: 4+2=6, 9+2=11, and then 14 leave none.
    assert engine.limits == [3, 3]
    assert (episode.finish_reason, episode.n_turns) == ("context", 2)
    assert len(episode.trajectories[0].tokens_T) == 11
    [episode] = play(game(Endless, max_turns=8, max_length=15), engine, task("1", most=3))
    assert engine.limits[2:] == [3, 3, 1]
    with pytest.raises(ValueError, match=r"have 4 tokens, and an episode may have environment\.max_length=4"):
        play(game(Endless, max_length=4), engine, task("1"))


class Endless:
    """A game that has no end, with rewards by name."""

    def reset(self) -> None: ...

    def step(self, move: str) -> tuple[str, dict[str, float], bool, bool, dict[str, Any]]:
        return "1+2", {"moves": 1.0, "length": len(move)}, False, False, {}


def test_rewards_by_name_add_up_over_turns(game: Callable[..., Game]) -> None:
    [episode] = play(game(Endless, max_turns=2), Replies(lambda text: "11"), task("1", most=3))
    assert episode.rewards == {"moves": 2.0, "length": 4.0}
    assert episode.finish_reason == "turns"


class SeesRow:
    """A game that ends with what it was given, in an opening text and as coroutines."""

    async def reset(self, extra_info: dict[str, int], seed: int, **row: Any) -> tuple[str, dict[str, Any]]:
        await asyncio.sleep(0)
        self.given = {"extra_info": extra_info, "seed": seed, **row}
        return "3+", {}

    async def step(self, move: str) -> tuple[str, float, bool]:
        assert self.given == {
            "prompt": "1+2=", "ground_truth": "4", "data_source": "digits", "extra_info": {"level": 2}, "seed": 9,
            "messages": [{"role": "user", "content": "1+2="}],
        }  # fmt: skip
        return "", 0.25, True


def test_a_game_sees_its_row_and_may_open_with_a_text(game: Callable[..., Game]) -> None:
    [episode] = play(game(SeesRow), Replies(lambda text: "7"), task("4", seed=9))
    [trajectory] = episode.trajectories
    assert TOKENIZER.decode(trajectory.tokens_T.tolist()) == "1+2=3+7"
    assert episode.rewards == {"environment": 0.25}


def broken(reset: Any = None, **step: Any) -> type:
    """Return a game whose `reset` returns a value, and whose `step` returns or raises one."""

    class Broken:
        def reset(self) -> Any:
            return reset

        def step(self, move: str) -> Any:
            if "raises" in step:
                raise step["raises"]
            return step["returns"]

    return Broken


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (broken(raises=KeyError("board")), r"step, in an episode of prompt 4, failed:\n.*KeyError: 'board'"),
        (broken(raises=TimeoutError("no answer")), r"step, in an episode of prompt 4, failed:\n.*no answer"),
        (broken(returns=("", 1.0)), r"returned \('', 1.0\): it must return \(observation, reward, done\)"),
        (broken(returns=(None, 1.0, True)), r"returned \(None, 1.0, True\): it must return"),
        (broken(returns=("", float("nan"), True)), "it must return finite rewards"),
        (broken(returns=("", {"a": "1"}, True)), "it must return finite rewards"),
        (broken(reset=7), "reset, in an episode of prompt 4, returned 7: it must return a text"),
    ],
)
def test_a_game_that_fails_names_the_prompt_and_what_it_did(
    kind: type, message: str, game: Callable[..., Game]
) -> None:
    with pytest.raises(EnvironmentFailed, match=f"(?s)environment.game='fivefold.*{message}"):
        play(game(kind), Replies(lambda text: "7"), task("3"))


class Slow:
    """A game whose episode of the row 1 takes longer than all others."""

    seconds = 0.4

    def reset(self, ground_truth: str) -> None:
        self._is_slow = ground_truth == "1"

    def step(self, move: str) -> tuple[str, float, bool]:
        time.sleep(self.seconds if self._is_slow else 0.0)
        return "", 1.0, True


def test_a_slow_game_holds_up_no_other_and_has_a_limit(game: Callable[..., Game]) -> None:
    player = Player(Replies(lambda text: "7"), game(Slow))
    player.begin(0, [task("1")])
    player.begin(1, [task("2")])
    ended: list[int] = []
    while len(ended) < 2:
        ended += [number for number, _ in player.advance(0.05)]
    assert ended == [1, 0]
    with pytest.raises(EnvironmentFailed, match=r"prompt 2, took longer than environment\.timeout_s=0\.1 s"):
        play(game(Slow, timeout_s=0.1), Replies(lambda text: "7"), task("1"))


class Jitter(GuessDigit):
    """The game, whose answers come after random times."""

    def step(self, move: str) -> tuple[str, float, bool]:
        time.sleep(random.random() / 200)
        return super().step(move)


def test_answers_in_any_order_give_the_same_requests_in_the_same_order(game: Callable[..., Game]) -> None:
    seen = []
    for _ in range(3):
        engine = Replies(lambda text: "1")
        play(game(Jitter), engine, *(task(str(1 + seed % 9), seed) for seed in range(12)))
        seen.append([(request.token_ids, request.seed) for request in engine.seen])
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 2 * 1 + 10 * 3


def test_moves_have_their_place_their_reward_and_their_state(game: Callable[..., Game]) -> None:
    class Board(GuessDigit):
        def step(self, move: str) -> tuple[str, dict[str, float], bool]:
            observation, won, done = super().step(move)
            return observation, {"won": won, "moves": -0.1}, done

    [first] = play(game(Board), Replies(halving), task("2"))
    [again] = play(game(Board), Replies(halving), task("1"))
    for episode in (first, again):
        [trajectory] = episode.trajectories
        assert all(trajectory.mask_T[move.start : move.start + move.n_tokens].all() for move in episode.moves)
        assert sum(move.n_tokens for move in episode.moves) == trajectory.mask_T.sum()
    assert [move.rewards for move in first.moves] == [{"won": 0.0, "moves": -0.1}, {"won": 1.0, "moves": -0.1}]
    assert first.rewards == {"won": 1.0, "moves": -0.2}
    # Both begin with the same prompt and a 5, to which the game gives the same answer.
    assert [a.state == b.state for a, b in zip(first.moves, again.moves, strict=False)] == [True, True]
    assert len({move.state for move in again.moves}) == len(again.moves) == 3

    class Named(Board):
        def state(self) -> int:
            return 1

    [named] = play(game(Named), Replies(halving), task("1"))
    assert [move.state for move in named.moves] == ["1", "1", "1"]


def flaky(n_failures: int) -> type:
    """Return a game that fails in so many of its first moves."""
    left = [n_failures]

    class Flaky(GuessDigit):
        def step(self, move: str) -> tuple[str, float, bool]:
            if left[0]:
                left[0] -= 1
                raise ConnectionError("the board is away")
            return super().step(move)

    return Flaky


@pytest.mark.parametrize("n_failures", [0, 1])
def test_nothing_is_trained_of_an_episode_whose_game_fails(
    n_failures: int, game: Callable[..., Game], capsys: pytest.CaptureFixture[str]
) -> None:
    [episode] = play(Failing(game(flaky(n_failures))), Replies(halving), task("2"))
    if n_failures == 0:
        assert transcript_text(TOKENIZER, episode) == "5⟦<1+2=⟧2"
        assert episode.rewards == {"environment": 1.0}
        n_sampled = int(episode.trajectories[0].mask_T.sum())
        assert (episode.effort.given, episode.effort.calls) == (episode.n_tokens - n_sampled, None)
        assert 0 < episode.effort.seconds < 5
        return
    assert (episode.finish_reason, episode.n_turns, episode.rewards) == ("failed", 0, {})
    assert "ConnectionError: the board is away" in transcript_text(TOKENIZER, episode)
    assert not len(episode.sampled_tokens)
    assert "ConnectionError: the board is away" in capsys.readouterr().out, "the replica's log has it"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "defines no 'Game'"),
        ("Game = 3", "is a int: name a class"),
        ("class Game:\n def reset(self): ...", "has no method 'step': it needs reset, step"),
        ("class Game:\n def reset(self): ...\n def step(self): ...", r"step\(self\) cannot be called"),
        (
            "class Game:\n def reset(self, board): ...\n def step(self, move): ...",
            "missing a required argument: 'board'",
        ),
        ("class Game:\n def __init__(self, size): ...\n def reset(self): ...\n def step(self, move): ...", "'size'"),
    ],
)
def test_a_class_that_is_no_game_is_refused(source: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "my_game.py").write_text(source)
    with pytest.raises(ValueError, match=rf"environment\.game.*{message}"):
        load_game(config(game=f"{tmp_path}/my_game.py:Game"))


RECIPE = ROOT / "recipes" / "guess-digit.yaml"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["environment=null"], r"reward\.fn=environment is what an environment gives"),
        (["reward.fn=math"], r"gives rewards, and none of the recipe's is it: set reward\.fn=environment"),
        (["actor.advantage=remax"], "actor.advantage=remax is for single completions"),
        (["actor.overlong_reward_penalty=true"], "actor.overlong_reward_penalty=true is for single completions"),
        (["reward.kwargs.x=1"], "what an environment gives has no keyword arguments"),
    ],
)
def test_a_recipe_in_which_environment_and_rewards_do_not_fit_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_recipe(RECIPE, overrides, TrainRecipe)


def test_a_file_is_found_by_processes_with_other_working_folders() -> None:
    assert config(game="games/mine.py:Game").located(Path("/runs")).game == "/runs/games/mine.py:Game"
    assert config().located(Path("/runs")).game == "fivefold.environments.guess_digit:GuessDigit"
