"""FrozenLake and Sokoban, their rows, and games that are played in a chat."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from fivefold.config.schema.data import DatasetConfig
from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.data.prompts import load_prompts
from fivefold.environments import game as game_module
from fivefold.environments.agents.chat_game import ChatGame
from fivefold.environments.build import build_environment, check_environment
from fivefold.environments.games.board import STEPS, Board
from fivefold.environments.games.grid import GridGame, board_of
from fivefold.environments.games.sokoban import Sokoban
from fivefold.environments.play import Player
from fivefold.types import Episode
from tests.unit.environments.test_agents import (
    CHATML,
    END,
    FORGETFUL,
    Policy,
    apart,
    task,
    texts,
    tokenizer_of,
    trained,
)
from tests.unit.environments.test_play import played

LAKE = {"game": "frozen_lake", "options": {"is_slippery": False}}
ROWS = "fivefold.environments.games.rows:rows"
KEY = "fivefold.environments.games.grid:GridGame"


def shortest(name: str, options: dict[str, Any], seed: int) -> list[str]:
    """Return the moves of the shortest way that ends with a positive reward, by trying all."""
    waiting, seen = deque[list[str]]([[]]), set[tuple[str, ...]]()
    while waiting:
        moves = waiting.popleft()
        board: Board = board_of(name, options, seed)
        reward, is_over = 0.0, False
        for move in moves:
            reward, is_over = board.move(move)
        if is_over and reward > 0:
            return moves
        state = tuple(board.rows())
        if not is_over and state not in seen:
            seen.add(state)
            waiting += [[*moves, direction] for direction in STEPS]
    raise AssertionError("there is no way")


@pytest.mark.parametrize("seed", range(12))
def test_every_board_can_be_won_and_is_the_same_for_a_seed(seed: int) -> None:
    for name, options in (
        ("frozen_lake", {"size": 4, "is_slippery": False}),
        ("sokoban", {"dim_room": [6, 6], "num_boxes": 1}),
    ):
        assert shortest(name, options, seed)
        assert board_of(name, options, seed).rows() == board_of(name, options, seed).rows()
        others = {tuple(board_of(name, options, other).rows()) for other in range(10)}
        assert len(others) > 5


def test_a_level_has_as_many_boxes_as_targets_none_of_them_there_and_walls_around() -> None:
    for seed in range(10):
        rows = Sokoban(seed, dim_room=[7, 8], num_boxes=2).rows()
        text = "".join(rows)
        assert [text.count(symbol) for symbol in "X√"] == [2, 0]
        assert text.count("O") + text.count("S") == 2
        assert text.count("P") + text.count("S") == 1
        assert {*rows[0], *rows[-1], *(row[0] + row[-1] for row in rows)} <= {"#", "##"}


def test_pushes_earn_what_gym_sokoban_gives() -> None:
    board = Sokoban(0, dim_room=[5, 7], num_boxes=2)
    board._floor = {(2, column) for column in range(1, 6)} | {(1, 2)}
    board._targets, board._boxes, board._player = frozenset({(2, 3), (1, 2)}), frozenset({(2, 2), (1, 2)}), (2, 1)
    assert board.rows() == ["#######", "##√####", "#PXO__#", "#######", "#######"]
    assert board.move("Right") == (pytest.approx(-0.1 + 1 + 10), True)
    assert board.rows()[2] == "#_P√__#"
    assert board.move("Right") == (pytest.approx(-0.1 - 1), False)
    assert board.rows()[2] == "#__SX_#"
    assert board.move("Down") == board.move(None) == (-0.1, False)
    board.move("Right")
    assert board.rows()[2] == "#__OPX#"
    assert board.move("Right") == (-0.1, False)
    assert board.rows()[2] == "#__OPX#"  # a wall is behind the box


def test_ice_is_slippery_in_three_directions() -> None:
    ends = set()
    for seed in range(200):
        board = board_of("frozen_lake", {"size": 3, "p": 1.0}, seed)
        rows = board.rows()
        if rows[1][1] == "P":
            board.move("Right")
            ends.add(next((number, row.index(s)) for number, row in enumerate(board.rows()) for s in "P√" if s in row))
    assert ends == {(1, 2), (0, 1), (2, 1)}


def test_a_hole_ends_the_game_without_a_reward() -> None:
    for seed in range(50):
        board = board_of("frozen_lake", {"is_slippery": False, "p": 0.5}, seed)
        for move in ("Right", "Down", "Left", "Up"):
            reward, is_over = board.move(move)
            if is_over:
                break
        if is_over and not reward:
            assert "X" in "".join(board.rows())
            return
    raise AssertionError("no hole was met")


def test_an_answer_without_a_move_stands_still_and_is_punished() -> None:
    game = GridGame()
    first = game.reset({**LAKE, "format_penalty": -0.5, "seed": 1}, seed=99)
    assert first == "\n".join(board_of("frozen_lake", LAKE["options"], 1).rows())
    for answer in ("Right", "<answer>Jump</answer>", ""):
        assert game.step(answer) == (first, -0.5, False)
    think = GridGame()
    think.reset({**LAKE, "move_pattern": "<think>(.*?)</think><answer>(.*?)</answer>", "seed": 1}, seed=0)
    moves = shortest("frozen_lake", LAKE["options"], 1)
    results = [think.step(f"<think>Left\n</think><answer> {move.lower()} </answer>") for move in moves]
    assert [result[1:] for result in results] == [(0.0, False)] * (len(moves) - 1) + [(1.0, True)]


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"game": "chess"}, "game='chess' is none of frozen_lake, sokoban"),
        ({"game": "sokoban", "options": {"size": 4}}, "the game sokoban cannot be made with options="),
        ({"game": "sokoban", "options": {"dim_room": [3, 9]}}, "a level has at least 4 rows"),
        ({"game": "sokoban", "options": {"dim_room": [4, 4], "num_boxes": 9}}, "no level with num_boxes=9 was found"),
        ({"game": "frozen_lake", "options": {"size": 1}}, "a lake has a size of at least 2"),
    ],
)
def test_games_that_cannot_be_made_are_refused(info: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GridGame().reset(info, seed=0)


def test_rows_are_made_by_a_seed() -> None:
    games = {"Lake": {**LAKE, "n": 2, "rules": "Cross."}, "Boxes": {"game": "sokoban", "n": 1, "format_penalty": -1}}
    config = DatasetConfig.model_validate(
        {"path": "games", "reader": ROWS, "reader_kwargs": {"games": games, "seed": 5}, "system_prompt": "Play."}
    )
    prompts = load_prompts(config, CHATML).prompts
    assert [prompt.data_source for prompt in prompts] == ["Lake", "Lake", "Boxes"]
    assert [prompt.extra_info["seed"] for prompt in prompts] == [5, 6, 7]
    assert prompts[0].extra_info == {**LAKE, "seed": 5}
    assert prompts[0].chat == ({"role": "system", "content": "Play."}, {"role": "user", "content": "Cross."})
    assert "Push all boxes" in prompts[2].text


class Counter:
    """Ends at the third move."""

    def reset(self, ground_truth: str) -> tuple[str, dict[str, Any]]:
        self.moves: list[str] = []
        return f"begin {ground_truth}", {}

    def step(self, move: str) -> tuple[str, float, bool]:
        self.moves.append(move)
        return f"seen {'|'.join(self.moves)}", float(len(self.moves)), len(self.moves) == 3


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Episode]:
    """(what the model says in each turn, fields of the section) -> the episode."""

    def run(*says: str, template: str | None = None, **fields: Any) -> Episode:
        monkeypatch.setattr(game_module, "load_class", lambda *_: Counter)
        shown = "{turn} of {turns_left}: {observation}."
        config = EnvironmentConfig(**{"game": "a:B", "turn_template": shown, "max_length": 4000, **fields})
        tokenizer = CHATML if template is None else tokenizer_of(template)
        environment, left = build_environment(config, tokenizer), list(says)
        player = Player(Policy(lambda text: left.pop(0)), environment)
        player.begin(0, [task("Count.")])
        [episode] = played(player)[0]
        return episode

    return run


def test_answers_of_a_game_are_messages_of_the_user(run: Callable[..., Episode]) -> None:
    episode = run("ab", "c", "d")
    [text] = texts(episode)
    assert text == (
        "<|im_start|>user\nCount.\n1 of 8: begin Count..<|im_end|>\n<|im_start|>assistant\nab<|im_end|>\n"
        "<|im_start|>user\n2 of 7: seen ab.<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
        "<|im_start|>user\n3 of 6: seen ab|c.<|im_end|>\n<|im_start|>assistant\nd<|im_end|>"
    ).replace("begin Count.", f"begin {task('Count.').prompt.ground_truth}")
    assert trained(episode) == [[*apart("ab"), END, *apart("c"), END, *apart("d"), END]]
    assert (episode.finish_reason, sum(episode.rewards.values())) == ("done", 6.0)
    assert [sum(move.rewards.values()) for move in episode.moves] == [1.0, 2.0, 3.0]


def test_a_chat_ends_at_the_limit_of_turns_and_stays_one_sequence(run: Callable[..., Episode]) -> None:
    episode = run("<think>x</think>a", "b", template=FORGETFUL, max_turns=2)
    assert (episode.finish_reason, sum(episode.rewards.values())) == ("turns", 3.0)
    [text] = texts(episode)
    assert "<think>x</think>a" in text


def test_a_chat_needs_a_template_and_a_text_with_the_observation() -> None:
    config = EnvironmentConfig(game=KEY, turn_template="{observation}")
    bare = tokenizer_of()
    bare.chat_template = None
    for build in (check_environment, ChatGame):
        with pytest.raises(ValueError, match=r"environment\.turn_template needs a chat template"):
            build(config, bare)
    check_environment(config, CHATML)
    with pytest.raises(ValueError, match=r"turn_template has no \{observation\}"):
        EnvironmentConfig(game=KEY, turn_template="Go on.")


class Stateful(Counter):
    """The same, with a state that comes again."""

    def state(self) -> str:
        return f"parity {len(self.moves) % 2}"


MEMORY = "{prompt} {turns_done} done, last {turns_shown}: {history} now {observation}; turn {turn}, {turns_left} left"


def test_with_a_memory_each_turn_is_a_chat_that_shows_the_last_turns(run: Callable[..., Episode]) -> None:
    episode = run("ab", "c", "d", turn_template=MEMORY, memory=1)
    first = f"begin {task('Count.').prompt.ground_truth}"

    def chat(text: str, answer: str) -> str:
        return f"<|im_start|>user\nCount. {text}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>"

    assert texts(episode) == [
        chat(f"0 done, last 0:  now {first}; turn 1, 8 left", "ab"),
        chat(f"1 done, last 1: (turn 1, observation: {first}, answer: ab) now seen ab; turn 2, 7 left", "c"),
        chat("2 done, last 1: (turn 2, observation: seen ab, answer: c) now seen ab|c; turn 3, 6 left", "d"),
    ]
    assert trained(episode) == [[*apart(answer), END] for answer in ("ab", "c", "d")]
    assert (episode.finish_reason, episode.n_turns) == ("done", 3)
    assert [sum(move.rewards.values()) for move in episode.moves] == [1.0, 2.0, 3.0]
    assert len({move.state for move in episode.moves}) == 3
    # Without history, turns may read the same, and each is sampled.
    alike = run("a", "b", "c", turn_template="{observation}", memory=0, max_turns=2)
    assert (alike.finish_reason, len(texts(alike))) == ("turns", 2)
    assert all(text.startswith("<|im_start|>user\nCount.\n") for text in texts(alike))
    short = run("a" * 50, "b", turn_template=MEMORY, memory=1, max_length=130)
    assert short.finish_reason == "context"


def test_turns_are_in_the_state_that_the_game_names(
    run: Callable[..., Episode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "Counter", Stateful)
    for fields in ({"turn_template": MEMORY, "memory": 2}, {}):
        episode = run("a", "b", "c", **fields)
        assert [move.state for move in episode.moves] == ["parity 0", "parity 1", "parity 0"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memory": 1, "turn_template": "{observation}"}, r"memory=1, and turn_template has no \{history\}"),
        ({"turn_template": "{observation} {prompt}"}, r"turn_template has \{prompt\}, which the messages of one chat"),
        ({"memory": 1}, "memory"),
    ],
)
def test_a_memory_needs_its_place_in_the_text(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EnvironmentConfig(game=KEY, **fields)
