"""Rewards that judge all responses to a prompt together."""

from __future__ import annotations

from typing import Any

import pytest

from fivefold.config.schema.rewards import RewardConfig
from fivefold.experience.samples import judged
from fivefold.rewards.resolve import resolve_rewards
from fivefold.rewards.reward_set import RewardSet
from fivefold.rewards.user_function import UserReward
from fivefold.types import Prompt, Sample
from tests.unit.rewards.conftest import Write

MODULE = """\
seen = []
def rank(responses, ground_truth, *, data_source, extra_info, scale=1.0):
    seen.append((tuple(responses), ground_truth, data_source, extra_info))
    order = sorted(responses, key=len)
    return [scale * order.index(response) for response in responses]
async def rank_later(responses, ground_truth, **_): return rank(responses, ground_truth, data_source="", extra_info={})
def few(responses, ground_truth, **_): return [1.0] * (len(responses) - 1)
def one(responses, ground_truth, **_): return 1.0
def nan(responses, ground_truth, **_): return [float("nan")] * len(responses)
def counts(response, ground_truth, **_): return len(response)
"""


@pytest.fixture(autouse=True)
def module(write_module: Write) -> None:
    write_module("group_rewards.py", MODULE)


def sample(prompt: int, response: str, *, source: str = "", failed: bool = False) -> Sample:
    question = Prompt(prompt, "q", (1,), f"truth {prompt}", source, {"row": prompt})
    stop: Any = "failed" if failed else "stop"
    return Sample(question, response, stop, 2, 1, (0, 0))


def rewards_of(**reward: Any) -> RewardSet:
    return resolve_rewards(RewardConfig(**reward))


def seen(rewards: RewardSet) -> list[tuple[Any, ...]]:
    """Return what the module has noted; each test has a new one."""
    reward = rewards.rewards[0].reward.reward
    assert isinstance(reward, UserReward)
    return reward.function.__globals__["seen"]


@pytest.mark.parametrize("function", ["rank", "rank_later"])
def test_a_function_gets_the_responses_of_a_prompt_together(function: str) -> None:
    rewards = rewards_of(fn=f"group_rewards:{function}")
    # Two groups of the same row stay apart.
    groups = [[sample(3, "aaa"), sample(3, "a"), sample(3, "aa")], [sample(3, "bb"), sample(3, "b")]]
    [name] = [each.reward.name for each in rewards.rewards]
    assert [value[name] for value in judged(groups, rewards)] == [2, 0, 1, 1, 0]
    assert [responses for responses, *_ in seen(rewards)] == [("aaa", "a", "aa"), ("bb", "b")]
    if function == "rank":
        assert seen(rewards)[0][1:] == ("truth 3", "", {"row": 3})


def test_groups_keep_to_the_data_sources_of_a_reward_and_to_episodes_that_did_not_fail() -> None:
    rewards = rewards_of(
        rewards={
            "rank": {"fn": "group_rewards:rank", "data_sources": ["a"], "kwargs": {"scale": 0.5}},
            "length": {"fn": "group_rewards:counts"},
        }
    )
    groups = [
        [sample(0, "xx", source="b"), sample(0, "x", source="b")],
        [sample(1, "yyy", source="a"), sample(1, "", source="a", failed=True), sample(1, "y", source="a")],
    ]
    failed = [each.has_failed for group in groups for each in group]
    assert failed == [False, False, False, True, False], "this test needs an episode that failed"
    assert judged(groups, rewards) == [
        {"length": 2}, {"length": 1}, {"rank": 0.5, "length": 3}, {}, {"rank": 0.0, "length": 1},
    ]  # fmt: skip
    assert [responses for responses, *_ in seen(rewards)] == [("yyy", "y")]


@pytest.mark.parametrize("function", ["few", "one", "nan"])
def test_anything_but_a_number_for_each_response_is_refused(function: str) -> None:
    rewards = rewards_of(fn=f"group_rewards:{function}")
    message = r"prompt 3 .*2 responses, the first 'a': it must return a finite number for each of the 2 responses"
    with pytest.raises(ValueError, match=message):
        judged([[sample(2, "a"), sample(2, "b")]], rewards)
