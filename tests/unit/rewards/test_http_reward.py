"""The reward `http`, against a server of the test's own. What it shares with `judge` is tested there."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fivefold.config.schema.rewards import RewardConfig
from fivefold.rewards.resolve import resolve_reward
from fivefold.rewards.static_check import reward_problems
from tests.unit.rewards.conftest import LONGEST_S, Serve, judge


def config(url: str, **kwargs: Any) -> RewardConfig:
    return RewardConfig(fn="http", kwargs={"url": url, "backoff_s": 0.001, "timeout_s": LONGEST_S, **kwargs})


def test_the_service_gets_what_a_function_gets(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORE_KEY", "secret")
    url, seen = serve(lambda body: json.dumps({"score": len(body["response"]), "why": "length"}).encode())
    reward = resolve_reward(config(url, scale=0.5, api_key_env="SCORE_KEY"))
    assert judge(reward, "four", ["x", 2], {"a": [1]}) == 2.0
    assert seen == [
        {
            "prompt": "q", "response": "four", "ground_truth": ["x", 2], "data_source": "sums",
            "extra_info": {"a": [1]}, "key": "Bearer secret", "path": "/score",
        }
    ]  # fmt: skip


def test_names_of_the_request_and_of_the_score_are_the_services(serve: Serve) -> None:
    url, seen = serve(lambda body: b'{"rm": 0.25}')
    reward = resolve_reward(config(url, fields={"query": "response", "label": "ground_truth"}, score="rm"))
    assert judge(reward, "x", "7") == 0.25
    assert seen == [{"query": "x", "label": "7", "key": None, "path": "/score"}]
    url, _ = serve(lambda body: b"-1.5")
    assert judge(resolve_reward(config(url)), "x", "7") == -1.5


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"<html>", "the reply is no JSON: '<html>'"),
        (b'{"scores": 1}', "the reply has no number 'score'"),
        (b'{"score": "1"}', "the reply has no number 'score'"),
        (b"true", "the reply has no number 'score'"),
        (b"NaN", "the score is no finite number"),
        (b"1" + b"0" * 400, "the score is no finite number"),
        (b"[" * 100_000, "the reply is no JSON"),
    ],
)
def test_replies_without_a_score_are_asked_for_again_and_then_end_the_run(
    serve: Serve, reply: bytes, message: str
) -> None:
    url, seen = serve(lambda body: reply)
    with pytest.raises(ValueError, match=f"gave no usable answer in 3 attempts: {message}"):
        judge(resolve_reward(config(url, retries=2)), "x", "7")
    assert len(seen) == 3
    assert judge(resolve_reward(config(url, retries=0, on_failure=-0.5)), "x", "7") == -0.5


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"url": "localhost:80"}, "must be a URL such as"),
        ({"fields": {"x": "respons"}}, "sends 'respons', which is none of prompt, response, ground_truth"),
        ({"fields": {"x": "prompt"}}, "has no response, so every response would have the same score"),
        ({"concurrency": 0}, "must be from 1 to 1,024"),
        ({"pattern": "x"}, "the reward 'http' takes"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_plan(kwargs: dict[str, Any], message: str) -> None:
    [problem] = reward_problems(config(**{"url": "http://localhost:1/x", **kwargs}))
    assert message in problem
