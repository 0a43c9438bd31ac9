"""OpenAI's own client against the sessions: chats, tools, streams and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from fivefold.types import Episode
from tests.unit.environments import test_agents
from tests.unit.environments.test_agents import TOOLS, Policy, calls_a_tool, task, texts, trained, user

run = test_agents.run


def test_a_chat_with_tools_is_one_sequence_of_what_was_sampled(run: Callable[..., list[Episode]]) -> None:
    async def agent(base_url: str, api_key: str, model: str, messages: list[Any]) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            first = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)  # type: ignore[arg-type]
            message = first.choices[0].message
            [call] = message.tool_calls or []
            assert json.loads(call.function.arguments) == {"x": 1, "y": 2}  # type: ignore[union-attr]
            messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "3"}]
            last = await client.chat.completions.create(model=model, messages=messages, tools=TOOLS)  # type: ignore[arg-type]
            assert last.choices[0].message.content == "It is 3."
            assert last.usage is not None
            assert last.usage.total_tokens == len(policy.seen[1].token_ids) + len(policy.sampled[1])
        return 1.0

    policy = Policy(calls_a_tool)
    [episode] = run(agent, policy, task("1+2?"))
    assert trained(episode) == [policy.sampled[0] + policy.sampled[1]]
    assert "1+2?" in texts(episode)[0]


def test_a_stream_is_the_answer_in_one_piece(run: Callable[..., list[Episode]]) -> None:
    def agent(base_url: str, api_key: str, model: str, messages: list[Any]) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        chunks = list(client.chat.completions.create(model=model, messages=messages, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "ab"
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
        assert [each.id for each in client.models.list()] == ["policy"]
        text = client.completions.create(model=model, prompt="go", max_tokens=5)
        assert (text.choices[0].text, text.choices[0].finish_reason) == ("ab", "stop")
        return 1.0

    run(agent, Policy(lambda text: "ab"))


def test_what_cannot_be_trained_on_is_a_bad_request(run: Callable[..., list[Episode]]) -> None:
    def agent(base_url: str, api_key: str, model: str, messages: list[Any]) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        with pytest.raises(openai.BadRequestError, match="n=3 is not supported"):
            client.chat.completions.create(model=model, messages=messages, n=3)
        for turn in range(2):
            client.completions.create(model=model, prompt=f"go {turn}")
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model=model, prompt="go on")
        assert error.value.code == "max_turns_reached"
        return 1.0

    [episode] = run(agent, Policy(lambda text: "ab"), max_turns=2)
    assert (episode.finish_reason, episode.n_turns) == ("turns", 2)


RESPONSE_TOOLS: Any = [{"type": "function", **TOOLS[0]["function"], "strict": False}]  # type: ignore[dict-item]


@pytest.mark.parametrize("streams", [False, True])
def test_responses_with_tools_are_one_sequence_of_what_was_sampled(
    run: Callable[..., list[Episode]], streams: bool
) -> None:
    def agent(base_url: str, api_key: str, model: str) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key)

        def ask(items: Any) -> Any:
            options: Any = {"model": model, "instructions": "Be brief.", "input": items, "tools": RESPONSE_TOOLS}
            if not streams:
                return client.responses.create(**options)
            with client.responses.stream(**options) as stream:
                return stream.get_final_response()

        items: list[Any] = [user("1+2?")]
        first = ask(items)
        assert first.output_text == "Let me see."
        [call] = [item for item in first.output if item.type == "function_call"]
        assert json.loads(call.arguments) == {"x": 1, "y": 2}
        items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
        assert ask(items).output_text == "It is 3."
        return 1.0

    policy = Policy(calls_a_tool)
    [episode] = run(agent, policy)
    assert trained(episode) == [policy.sampled[0] + policy.sampled[1]]
    assert "<|im_start|>system\nBe brief.<|im_end|>" in texts(episode)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"previous_response_id": "resp-1"}, "previous_response_id is not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools of the type 'web_search' are not supported"),
        (
            {"input": [{"type": "reasoning", "id": "x", "summary": []}]},
            "items of the type 'reasoning' are not supported",
        ),
        ({"input": []}, "must be a text, or a list that is not empty"),
    ],
)
def test_a_response_that_cannot_be_given_is_a_bad_request(
    run: Callable[..., list[Episode]], options: dict[str, Any], message: str
) -> None:
    def agent(base_url: str, api_key: str, model: str) -> float:
        client = openai.OpenAI(base_url=base_url, api_key=api_key)
        asked: Any = {"model": model, "input": "x"} | options
        with pytest.raises(openai.BadRequestError, match=message):
            client.responses.create(**asked)
        cut = client.responses.create(model=model, input="x", max_output_tokens=7)
        assert (cut.status, cut.output_text) == ("incomplete", "ab")
        return 1.0

    run(agent, Policy(lambda text: "ab", is_cut=True))
