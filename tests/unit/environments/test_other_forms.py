"""Sessions in Anthropic's form, and with tokens in and out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import urllib3

from fivefold.types import Completion, Episode
from tests.unit.environments import test_agents
from tests.unit.environments.test_agents import (
    CHATML,
    END,
    Policy,
    apart,
    calls_a_tool,
    ids,
    post,
    task,
    texts,
    trained,
    user,
)

run = test_agents.run
TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}


def test_a_conversation_in_anthropics_form_is_one_sequence(run: Callable[..., list[Episode]]) -> None:
    def agent(base_url: str) -> float:
        asked: dict[str, Any] = {"model": "policy", "max_tokens": 150, "system": "Be brief.", "tools": [TOOL]}
        chat: list[Any] = [user("1+2?")]
        first = post(base_url, "messages", **asked, messages=chat)
        assert first["stop_reason"] == "tool_use"
        said, call = first["content"]
        assert said == {"type": "text", "text": "Let me see."}
        assert (call["type"], call["name"], call["input"]) == ("tool_use", "add", {"x": 1, "y": 2})
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "3"}]}
        chat += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
        last = post(base_url, "messages", **asked, messages=chat)
        assert last["content"] == [{"type": "text", "text": "It is 3."}]
        assert (last["stop_reason"], last["usage"]["output_tokens"]) == ("end_turn", len(policy.sampled[1]))
        return 1.0

    policy = Policy(calls_a_tool)
    [episode] = run(agent, policy)
    assert trained(episode) == [policy.sampled[0] + policy.sampled[1]]
    [text] = texts(episode)
    assert "<|im_start|>system\nBe brief.<|im_end|>" in text
    assert "<|im_start|>tool\n3<|im_end|>" in text


def test_a_stream_in_anthropics_form_has_its_events(run: Callable[..., list[Episode]]) -> None:
    def agent(base_url: str) -> float:
        body = {"messages": [user("1+2?")], "tools": [TOOL], "stream": True, "max_tokens": 200}
        reply = urllib3.request("POST", f"{base_url}/messages", json=body, retries=False).data.decode()
        events = [json.loads(part.split("data: ")[1]) for part in reply.strip().split("\n\n")]
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        assert [event["type"] for event in events] == ["message_start", *block, *block, "message_delta", "message_stop"]
        assert json.loads(events[5]["delta"]["partial_json"]) == {"x": 1, "y": 2}
        assert events[7]["delta"]["stop_reason"] == "tool_use"
        return 1.0

    run(agent, Policy(calls_a_tool))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "must be a list that is not empty"),
        ({"messages": [{"role": "system", "content": "x"}]}, "must have the role user or assistant"),
        ({"messages": [user("x") | {"content": [{"type": "image"}]}]}, "blocks of the type 'image' are not supported"),
        ({"tool_choice": {"type": "any"}}, "tool_choice='any' is not supported"),
        ({"stop_sequences": [""]}, r"stop=\[''\] must be a text, or a list of texts"),
    ],
)
def test_what_cannot_be_answered_is_an_error_in_anthropics_form(
    run: Callable[..., list[Episode]], body: dict[str, Any], message: str
) -> None:
    found: list[Any] = []

    def agent(base_url: str) -> float:
        found.append(post(base_url, "messages", **({"messages": [user("x")], "max_tokens": 9} | body)))
        post(base_url, "messages", messages=[user("x")], max_tokens=9)
        return 0.0

    run(agent, Policy(lambda text: "ab"))
    [error] = found
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    with pytest.raises(ValueError, match=message):
        raise ValueError(error["error"]["message"])


def test_tokens_in_and_out_continue_what_was_sampled(run: Callable[..., list[Episode]]) -> None:
    def agent(base_url: str) -> float:
        root = base_url.removesuffix("/v1")
        tokens = ids("go")
        for more in ("!", "?", ""):
            body = {"token_ids": tokens, "sampling_params": {"max_tokens": 50}}
            [choice] = post(root, "inference/v1/generate", **body)["choices"]
            assert choice["token_ids"] == [*apart("ab"), END]
            assert [each["logprob"] for each in choice["logprobs"]["content"]] == [-0.5] * 3
            tokens = [*tokens, *choice["token_ids"], *ids(more)]
        error = post(root, "inference/v1/generate", token_ids=[10**6])["error"]
        assert "must be a list of numbers from 0 to" in error["message"]
        return 1.0

    [episode] = run(agent, Policy(lambda text: "ab"), task("go"))
    assert trained(episode) == [[*apart("ab"), END] * 3]
    turn = [*apart("ab"), END]
    assert texts(episode) == [CHATML.decode([*ids("go"), *turn, *ids("!"), *turn, *ids("?"), *turn])]


class Versions(Policy):
    """A policy whose tokens come from weights of two versions, as those over an update do."""

    def collect(self, seconds: float) -> list[tuple[int, Completion]]:
        [(number, whole)] = super().collect(seconds)
        n = len(whole.token_ids)
        versions = np.array([3] * (n - 1) + [4], np.int32)
        return [(number, replace(whole, logprobs=np.arange(n, dtype=np.float32), versions=versions))]


def test_tokens_in_and_out_in_sglangs_form(run: Callable[..., list[Episode]]) -> None:
    turn = [*apart("ab"), END]

    def agent(base_url: str) -> float:
        root = base_url.removesuffix("/v1")
        sampling = {"max_new_tokens": 50, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "n": 1}
        body = {"input_ids": ids("go"), "sampling_params": sampling, "return_logprob": True, "logprob_start_len": -1}
        first = post(root, "generate", **body)
        assert first["output_ids"] == turn
        meta = first["meta_info"]
        assert meta["output_token_logprobs"] == [[float(place), token, None] for place, token in enumerate(turn)]
        assert (meta["finish_reason"]["type"], meta["prompt_tokens"], meta["completion_tokens"]) == ("stop", 2, 3)
        assert meta["weight_version"] == "4"
        body = {"input_ids": [*ids("go"), *turn, *ids("!")], "stream": True}
        reply = urllib3.request("POST", f"{root}/generate", json=body, retries=False).data.decode()
        event, end = reply.strip().split("\n\n")
        assert json.loads(event.removeprefix("data: "))["output_ids"] == turn
        assert end == "data: [DONE]"
        return 1.0

    [episode] = run(agent, Versions(lambda text: "ab"), task("go"))
    assert trained(episode) == [[*turn, *turn]]
    assert texts(episode) == [CHATML.decode([*ids("go"), *turn, *ids("!"), *turn])]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": [[1, 2]]}, "input_ids=.* must be a list of numbers"),
        ({"text": "go"}, "text is not supported: /generate takes input_ids"),
        ({"input_ids": [1], "top_logprobs_num": 2}, "top_logprobs_num is not supported"),
        ({"input_ids": [1], "logprob_start_len": 0}, "prompts have no log-probs"),
        ({"input_ids": [1], "sampling_params": {"temperature": 0.5}}, "temperature=0.5 differs from gconfig"),
        ({"input_ids": [1], "sampling_params": {"ignore_eos": True}}, "ignore_eos=True is not supported"),
        ({"input_ids": [1], "sampling_params": [{}]}, "sampling_params=.* must be an object"),
    ],
)
def test_what_sglangs_form_cannot_have_is_refused(
    run: Callable[..., list[Episode]], body: dict[str, Any], message: str
) -> None:
    found: list[str] = []

    def agent(base_url: str) -> float:
        root = base_url.removesuffix("/v1")
        found.append(post(root, "generate", **body)["error"]["message"])
        post(root, "generate", input_ids=[1])
        return 0.0

    run(agent, Policy(lambda text: "ab"))
    with pytest.raises(ValueError, match=message):
        raise ValueError(found[0])


def test_the_list_of_models_says_how_long_an_episode_may_be(run: Callable[..., list[Episode]]) -> None:
    def agent(base_url: str) -> float:
        [model] = urllib3.request("GET", f"{base_url}/models").json()["data"]
        assert (model["id"], model["max_model_len"]) == ("policy", 2000)
        post(base_url, "completions", prompt="go")
        return 1.0

    [episode] = run(agent, Policy(lambda text: "ab"))
    assert episode.rewards == {"environment": 1.0}
