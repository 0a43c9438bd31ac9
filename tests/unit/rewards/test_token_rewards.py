"""Rewards of single tokens: a function is told the tokens that were sampled, and its numbers belong to their places."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from fivefold.batch import Columns
from fivefold.config.schema.rewards import RewardConfig
from fivefold.experience.samples import judged
from fivefold.rewards.resolve import resolve_rewards
from fivefold.rewards.token_rewards import TokenRewards
from fivefold.roles.remote_batch import Piece, RemoteBatch
from fivefold.types import Prompt, Sample
from tests.unit.rewards.conftest import Write

MODULE = """\
def values(token_ids): return [token / 10 for token in token_ids]
def by_token(response, ground_truth, *, token_ids, data_source, extra_info): return values(token_ids)
async def later(response, ground_truth, *, token_ids, **_): return values(token_ids)
def mapping(response, ground_truth, *, token_ids, **_): return {"token_rewards": values(token_ids), "score": 2.0}
def of_verl(data_source, solution_str, ground_truth, extra_info, token_ids):
    return {"token_rewards": values(token_ids), "score": 2.0}
def group(responses, ground_truth, *, token_ids, **_):
    return [values(own) if len(own) > 1 else 0.5 for own in token_ids]
def whole(response, ground_truth, *, token_ids, **_): return float(len(token_ids))
def array(response, ground_truth, *, token_ids, **_):
    import numpy
    return numpy.array(token_ids) / 10
def short(response, ground_truth, *, token_ids, **_): return values(token_ids)[1:]
def nan(response, ground_truth, *, token_ids, **_): return [0.0] * (len(token_ids) - 1) + [float("nan")]
def text(response, ground_truth, *, token_ids, **_): return "abc"
def words(response, ground_truth, *, token_ids, **_): return ["a" for _ in token_ids]
def untold(response, ground_truth, **_): return [0.0, 1.0]
"""
TOKENS, MASK = [[7, 8, 3, 4, 9, 5], [1, 6]], [[0, 0, 1, 1, 0, 1], [0, 1]]
"""Rows of an episode of two turns, and of one with a token."""


@pytest.fixture(autouse=True)
def module(write_module: Write) -> None:
    write_module("token_functions.py", MODULE)


@pytest.fixture(autouse=True)
def objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.roles.remote_batch.fetch", lambda columns: columns)


def judge(function: str) -> list[Any]:
    """Return the rewards of both rows, which are one group; their text has other tokens."""
    rewards = resolve_rewards(RewardConfig(fn=f"token_functions:{function}"))
    assert rewards.reads_tokens
    lengths = np.array([len(row) for row in TOKENS])
    values: dict[str, Any] = {
        "tokens": np.concatenate([np.array(row, np.int32) for row in TOKENS]),
        "mask": np.concatenate([np.array(row, bool) for row in MASK]),
    }
    columns: Any = Columns(lengths.astype(np.int32), values)
    trained = np.array([sum(row) for row in MASK])
    batch = RemoteBatch(lengths, trained, (Piece(columns, np.arange(2)),))
    samples = [
        Sample(Prompt(4, "q", (1,), "truth"), "text", "stop", n, k, (0, 0))
        for n, k in zip(lengths.tolist(), trained.tolist(), strict=True)
    ]
    return [value[f"token_functions:{function}"] for value in judged([samples], rewards, batch)]


@pytest.mark.parametrize(
    ("function", "whole"), [("by_token", 0), ("later", 0), ("array", 0), ("mapping", 2), ("of_verl", 2)]
)
def test_each_sampled_token_has_its_reward_and_the_response_their_sum(function: str, whole: float) -> None:
    first, second = judge(function)
    assert first.values == (0.3, 0.4, 0.5)
    assert first.places == (2, 3, 5), "tokens of the prompt and of the environment have none"
    assert (second.values, second.places) == ((0.6,), (1,))
    assert [float(first), float(second)] == pytest.approx([whole + 1.2, whole + 0.6])


def test_a_function_of_a_group_gets_the_tokens_of_each_response() -> None:
    first, second = judge("group")
    assert (first.values, first.places) == ((0.3, 0.4, 0.5), (2, 3, 5))
    assert (second, isinstance(second, TokenRewards)) == (0.5, False)


def test_a_function_that_is_told_the_tokens_may_return_one_number() -> None:
    assert judge("whole") == [3.0, 1.0]


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        ("short", r"on prompt 5 .*'text'.*: it returned 2 rewards of tokens, and the response has 3 tokens"),
        ("nan", r"on prompt 5 .*: its reward of token 3 is nan"),
        ("text", r"returned 'abc' on prompt 5 .*: it must return a finite number"),
        ("words", r"on prompt 5 .*could not convert string to float"),
    ],
)
def test_rewards_that_are_not_one_for_each_token_are_refused_with_the_row(function: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        judge(function)


def test_a_function_that_is_not_told_the_tokens_returns_one_number() -> None:
    rewards = resolve_rewards(RewardConfig(fn="token_functions:untold"))
    assert not rewards.reads_tokens
    sample = Sample(Prompt(4, "q", (1,), "truth"), "text", "stop", 3, 2, (0, 0))
    with pytest.raises(ValueError, match="it must return a finite number"):
        judged([[sample]], rewards)
    with pytest.raises(ValueError, match=r"reward\.kwargs has 'token_ids'"):
        resolve_rewards(RewardConfig(fn="token_functions:untold", kwargs={"token_ids": 1}))


def test_rewards_of_tokens_travel_between_processes() -> None:
    reward = pickle.loads(pickle.dumps(TokenRewards(1.5, (0.5, 1.0), (3, 4))))
    assert (float(reward), reward.values, reward.places) == (1.5, (0.5, 1.0), (3, 4))
