"""Sessions in Anthropic's form, and with tokens in and out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import urllib3

from fivefold.types import Episode
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
        ({"stop_sequences": ["x"]}, r"stop=\['x'\] is not supported"),
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
