"""What tokens get of rewards that their function gave to single tokens, by a plain loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fivefold.algorithms.reward_shaping import RewardShaping
from fivefold.config.load import load_recipe
from fivefold.config.methods import ADVANTAGES
from fivefold.config.schema.train import TrainRecipe
from fivefold.families.read import find_shape
from fivefold.observe.timers import PhaseTimers
from fivefold.rewards.token_rewards import TokenRewards
from fivefold.roles import remote_batch
from fivefold.roles.devices import Models
from fivefold.roles.remote_batch import RemoteBatch, read_columns
from fivefold.types import Prompt, Sample
from fivefold.update import token_rewards
from fivefold.update.compose import policy_update
from fivefold.update.policy import AdvantagesOfSamples
from fivefold.update.step import Prepared
from fivefold.update.token_rewards import RewardsOfTokens, TokenReturns
from tests.unit.roles.test_policy_update import QUICKSTART, RecordingActor

LENGTHS = np.array([6, 4])
OWN = {2: 0.25, 3: -1.0, 5: 0.5}
"""Rewards of tokens of the first row, by place."""


@pytest.fixture(autouse=True)
def _objects(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (remote_batch, token_rewards):
        monkeypatch.setattr(module, "put", lambda columns: columns)
    monkeypatch.setattr(remote_batch, "fetch", lambda columns: columns)


def step(total: float) -> Prepared:
    """Return two samples, of which the first has rewards of tokens, with a weight, and another reward."""
    of_tokens = TokenRewards(sum(OWN.values()) + 2.0, tuple(OWN.values()), tuple(OWN))
    prompt, weights = Prompt(0, "?", (1,), ""), {"a": 0.5, "b": 1.0}
    samples = [
        Sample(prompt, "", "stop", 6, 3, (0, 0), {"a": of_tokens, "b": 3.0}, weights),
        Sample(prompt, "", "stop", 4, 2, (0, 0), {"a": 1.0, "b": 2.0}, weights),
    ]
    values_N: Any = np.array([total, 7.0], np.float32)
    return Prepared(1, samples, RemoteBatch(LENGTHS, np.array([3, 2]), ()), None, values_N)  # type: ignore[arg-type]


@pytest.mark.parametrize("scaling", [1.0, 2.0])
def test_each_token_gets_what_is_earned_from_it_on(scaling: float) -> None:
    shaping = None if scaling == 1 else RewardShaping(10, scaling=scaling)
    total = 9.0
    batch = TokenReturns(shaping).prepare(step(total)).batch
    first, second = (columns["advantages"] for columns in read_columns(batch, 2))
    last = max(OWN)
    earned = {place: scaling * 0.5 * value for place, value in OWN.items()}
    earned[last] += total - sum(earned.values())  # what no token has earned belongs to the last one
    for place in OWN:
        assert first[place] == pytest.approx(sum(value for other, value in earned.items() if other >= place))
    assert first[min(OWN)] == total
    assert second.tolist() == [7.0] * 4


def test_the_critics_estimate_gets_the_rewards_of_tokens_alone() -> None:
    batch = RewardsOfTokens(RewardShaping(10, bias=5.0, scaling=2.0)).prepare(step(9.0)).batch
    first, second = (columns["token_rewards"] for columns in read_columns(batch, 2))
    assert first.tolist() == [2.0 * 0.5 * OWN.get(place, 0.0) for place in range(6)]
    assert second.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("advantage", "told", "part"),
    [
        ("reinforce_pp", True, TokenReturns),
        ("reinforce_pp", False, AdvantagesOfSamples),
        ("grpo", True, AdvantagesOfSamples),
    ],
)
def test_estimators_of_groups_take_the_sum(advantage: str, told: bool, part: type) -> None:
    recipe = load_recipe(QUICKSTART, [f"actor.advantage={advantage}"], TrainRecipe)
    update = policy_update(
        recipe, Models(RecordingActor()), PhaseTimers(), find_shape("package:tiny-moe"), token_rewards=told
    )
    own = [each for each in update.parts if isinstance(each, TokenReturns | AdvantagesOfSamples)]
    assert list(map(type, own)) == [part]
    assert {name for name, row in ADVANTAGES.items() if row.by_token} == {"reinforce_pp", "gae"}
