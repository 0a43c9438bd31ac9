"""The recipes with tools start from a model that calls them well, and seldom."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.config.load import load_recipe
from fivefold.config.schema.train import TrainRecipe
from fivefold.data.prompts import load_prompts
from fivefold.environments.build import build_environment
from fivefold.environments.environment import Task
from fivefold.environments.play import Player
from fivefold.rewards.resolve import resolve_rewards
from fivefold.rollout.protocol import SamplingParams, group_requests
from fivefold.rollout.tokenizer import decoded, load_tokenizer
from fivefold.rollout.transformers_engine import TransformersEngine
from tests.unit.environments.test_play import played

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "fivefold/models/tiny-moe-tools")
N = 60


@pytest.mark.parametrize("name", ["calculator", "search"])
def test_a_model_that_calls_its_tool_is_right_and_mostly_it_guesses(name: str) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml", [], TrainRecipe)
    tokenizer = load_tokenizer(MODEL)
    engine = TransformersEngine.from_path(
        MODEL, dtype="float32", device="cpu", max_batch_size=N, tokenizer_path=None, load_weights=True
    )
    assert recipe.valid_dataset is not None
    prompts = load_prompts(recipe.valid_dataset, tokenizer).prompts[:N]
    requests = group_requests([prompt.token_ids for prompt in prompts], 1, (1, "test"))
    player = Player(engine, build_environment(recipe.environment, tokenizer))
    sampling = SamplingParams.for_training(recipe)
    player.begin(0, [Task(prompt, request, sampling) for prompt, request in zip(prompts, requests, strict=True)])
    episodes = played(player)[0]
    texts = decoded(tokenizer, [episode.sampled_tokens for episode in episodes])
    reward = resolve_rewards(recipe.reward).rewards[0].reward
    right = [reward.judge(prompt, text) == [1.0] for text, prompt in zip(texts, prompts, strict=True)]
    calls = [episode.n_turns > 1 for episode in episodes]
    assert 0.05 * N < sum(calls) < 0.5 * N
    assert sum(r for r, called in zip(right, calls, strict=True) if called) >= 0.6 * sum(calls)
    assert sum(r for r, called in zip(right, calls, strict=True) if not called) <= 0.1 * N
    assert all(len(episode.trajectories) == 1 for episode in episodes), "a chat with calls stays one sequence"
    assert {episode.n_turns for episode in episodes} == {1, 2, 3}
