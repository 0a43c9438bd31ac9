"""The snippets of docs/agents.md do what the page says."""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fivefold.config.load import load_recipe
from fivefold.config.schema.data import DatasetConfig
from fivefold.config.schema.environment import EnvironmentConfig
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.prompts import load_prompts
from fivefold.environments.agents.agent import Agent
from fivefold.environments.agents.chat_game import ChatGame
from fivefold.environments.agents.tools import Tools
from fivefold.environments.agents.turn_game import TurnGame
from fivefold.environments.game import Game, load_game
from fivefold.environments.games import tagged_tools
from fivefold.environments.games.grid import GridGame
from fivefold.environments.play import Player
from fivefold.types import Episode
from tests.e2e.documents import DOCS, blocks
from tests.unit.environments import test_game
from tests.unit.environments.test_agents import Policy, task, texts, tokenizer_of
from tests.unit.environments.test_game import Replies, halving
from tests.unit.environments.test_play import played
from tests.unit.environments.test_tools import call

PAGE = DOCS / "agents.md"
RECIPE = test_game.ROOT / "recipes" / "guess-digit.yaml"


@pytest.fixture
def snippet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], None]:
    """(number of the block, name) -> writes the Python block to the file of that name in the working folder."""
    monkeypatch.chdir(tmp_path)

    def write(number: int, name: str) -> None:
        (tmp_path / name).write_text(blocks(PAGE, "python")[number])

    return write


def environment(**fields: Any) -> Any:
    """Return the section of a recipe with these keys, as processes in other folders get it."""
    config = TrainRecipe.model_fields["environment"].annotation
    assert config is not None
    [kind] = [each for each in config.__args__ if each is not type(None)]
    return kind(**{"max_length": 4000, **fields}).located(Path.cwd())


def test_the_game_is_the_one_of_the_recipe(snippet: Callable[[int, str], None]) -> None:
    snippet(0, "my_game.py")
    section, *_ = map(yaml.safe_load, blocks(PAGE, "yaml"))
    overrides = [f"environment={section['environment']}", f"reward={section['reward']}"]
    recipe = load_recipe(RECIPE, overrides, TrainRecipe)
    assert recipe.environment is not None
    assert recipe.environment.max_turns == 3
    tasks = [test_game.task(str(digit)) for digit in range(1, 10)]
    games = [
        test_game.play(Game(config, test_game.TOKENIZER), Replies(halving), *tasks)
        for config in (environment(game=recipe.environment.game, max_turns=3), test_game.config())
    ]
    told = [
        [(each.rewards, each.finish_reason, each.trajectories[0].tokens_T.tolist()) for each in episodes]
        for episodes in games
    ]
    assert told[0] == told[1]


def test_the_game_may_be_a_chat(snippet: Callable[[int, str], None]) -> None:
    snippet(0, "my_game.py")
    section = yaml.safe_load(blocks(PAGE, "yaml")[1])["environment"]
    policy = Policy(lambda text: "7" if "Turn 2" in text else "5")
    episode = episode_of(ChatGame(environment(**section), tokenizer_of()), policy, "7", "Guess.")
    [text] = texts(episode)
    assert "user\nTurn 2, 2 left: >1+2=<|im_end|>" in text or "user\nTurn 2, 2 left: <1+2=<|im_end|>" in text
    assert sum(episode.rewards.values()) == 1.0


def test_each_turn_may_be_a_chat(snippet: Callable[[int, str], None]) -> None:
    snippet(0, "my_game.py")
    section = yaml.safe_load(blocks(PAGE, "yaml")[2])["environment"]
    policy = Policy(lambda text: "7" if "1 turns are over" in text else "5")
    episode = episode_of(TurnGame(environment(**section), tokenizer_of()), policy, "7", "Guess.")
    assert len(episode.trajectories) == 2
    assert sum(episode.rewards.values()) == 1.0


def test_board_games_need_no_file() -> None:
    section = yaml.safe_load(blocks(PAGE, "yaml")[3])
    data = DatasetConfig.model_validate(section["train_dataset"])
    prompts = load_prompts(data, tokenizer_of()).prompts
    assert {prompt.data_source for prompt in prompts} == {"Lake", "Boxes"}
    EnvironmentConfig(**section["environment"])
    game = GridGame()
    assert game.reset(prompts[-1].extra_info, seed=0).count("X") == 1


def test_numbers_are_guessed_in_chats_of_one_turn() -> None:
    section = yaml.safe_load(blocks(PAGE, "yaml")[4])
    [prompt, *_] = load_prompts(DatasetConfig.model_validate(section["train_dataset"]), tokenizer_of()).prompts
    policy = Policy(lambda text: rf"\boxed{{{1 + text.count('Turn')}}}")
    player = Player(policy, TurnGame(environment(**section["environment"]), tokenizer_of()))
    player.begin(0, [replace(task("x"), prompt=replace(prompt, extra_info={**prompt.extra_info, "turns": 20}))])
    [episode] = played(player)[0]
    assert 1 <= len(episode.trajectories) <= 8
    assert sum(episode.rewards.values()) == (1.0 if episode.finish_reason == "done" else 0.0)


def test_the_tool_in_tags_is_the_one_of_the_recipe() -> None:
    section = yaml.safe_load(blocks(PAGE, "yaml")[5])
    data = DatasetConfig.model_validate(section["train_dataset"])
    [reader] = [getattr(tagged_tools, str(data.reader).rpartition(":")[2])]
    assert inspect.signature(reader).bind("path", None, **data.reader_kwargs)
    assert load_game(environment(**section["environment"])) is tagged_tools.TaggedTool
    assert section["gconfig"]["stop"] == ["</code>"]


def episode_of(kind: Any, policy: Policy, wanted: Any, prompt: str) -> Episode:
    player = Player(policy, kind)
    one = task(prompt)
    player.begin(0, [replace(one, prompt=replace(one.prompt, ground_truth=wanted))])
    [episode] = played(player)[0]
    return episode


def test_the_shop_sells_what_is_asked_for(snippet: Callable[[int, str], None]) -> None:
    snippet(1, "my_shop.py")
    says = [call("price", fruit="plum"), call("price", fruit="apple"), call("buy", fruit="apple", pieces=2), "Done."]
    tools = Tools(environment(tools="my_shop.py:Shop"), tokenizer_of())
    episode = episode_of(tools, Policy(lambda text: says.pop(0)), {"apple": 2}, "Two apples.")
    assert episode.rewards == {"environment": 1.0}
    [text] = texts(episode)
    assert "<|im_start|>tool\nError: KeyError('plum')<|im_end|>" in text
    assert "<|im_start|>tool\n2<|im_end|>" in text


def test_the_agent_asks_twice_and_is_judged_by_its_last_answer(snippet: Callable[[int, str], None]) -> None:
    snippet(2, "my_agent.py")
    agent = Agent(environment(agent="my_agent.py:solve"), tokenizer_of())
    says = ["Perhaps 4?", "4"]
    episode = episode_of(agent, Policy(lambda text: says.pop(0)), "4", "2+2?")
    assert (episode.rewards, episode.n_turns) == ({"environment": 1.0}, 2)
    assert "Are you sure?" in texts(episode)[0]


def test_mcp_servers_stand_in_the_list() -> None:
    section = yaml.safe_load(blocks(PAGE, "yaml")[6])
    calc, time, remote = environment(**section["environment"]).tools
    assert calc == f"{Path.cwd()}/calc.py:calculate"
    assert time == {"mcp": "uvx mcp-server-time", "cwd": str(Path.cwd())}
    assert remote == {"mcp": "http://127.0.0.1:8000/mcp"}


def test_the_lake_of_the_row_is_crossed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    monkeypatch.chdir(tmp_path)
    [line] = blocks(PAGE, "json")
    (tmp_path / "lake.jsonl").write_text(line)
    section = yaml.safe_load(blocks(PAGE, "yaml")[7])
    overrides = [f"{key}.{name}={value}" for key, values in section.items() for name, value in values.items()]
    recipe = load_recipe(RECIPE, [*overrides, "train_dataset.answer_key=null"], TrainRecipe)
    [prompt] = load_prompts(recipe.train_dataset, tokenizer_of()).prompts
    moves = ["down", "down", "right", "right", "down", "right"]
    config = environment(game=section["environment"]["game"], max_turns=section["environment"]["max_turns"])
    player = Player(Policy(lambda text: moves.pop(0)), Game(config, tokenizer_of()))
    player.begin(0, [replace(task(), prompt=prompt)])
    [episode] = played(player)[0]
    assert (episode.rewards, episode.finish_reason) == ({"environment": 1.0}, "done")


def test_problems_of_reasoning_gym_are_written(snippet: Callable[[int, str], None]) -> None:
    pytest.importorskip("reasoning_gym")
    snippet(3, "write.py")
    runpy.run_path("write.py")
    assert len(Path("legs.jsonl").read_text().splitlines()) == 1000
