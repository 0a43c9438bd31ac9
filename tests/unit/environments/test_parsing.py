"""What models write as messages: calls and thoughts in the forms of several families."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken

from fivefold.environments.agents.parsing import load_parser
from fivefold.types import Completion, Episode
from tests.unit.environments import test_agents
from tests.unit.environments.test_agents import ask, post, run, tokenizer_of, user
from tests.unit.environments.test_play import Scripted

__all__ = ["run"]

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}},
    },
}
WORDS = {
    "qwen3.5": ("<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
                "</tool_response>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    "glm-4.5": ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>",
                "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
                "</arg_value>"),
}  # fmt: skip
CALLS = {
    "qwen3.5": "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=note>\n7\n</parameter>\n"
    "</function>\n</tool_call>",
    "glm-4.5": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>note</arg_key>\n"
    "<arg_value>7</arg_value>\n</tool_call>",
    "hermes": '<tool_call>{"name": "add", "arguments": {"a": 2, "note": "7"}}</tool_call>',
}


END = {"qwen3.5": "<|im_end|>", "glm-4.5": "<|user|>", "hermes": "<|im_end|>"}


class Writes(Scripted):
    """An engine that writes one text; `spelled`: letter by letter, so that it has no token of a call."""

    def __init__(self, name: str, text: str, *, spelled: bool = False) -> None:
        super().__init__()
        self.tokenizer = tokenizer_of()
        words = WORDS.get(name, ())
        self.tokenizer.add_tokens([AddedToken(word, special=word.startswith(("<|", "[", "<sop"))) for word in words])
        parts = list(text) if spelled else [text]
        self._tokens = [token for part in (*parts, END[name]) for token in self.tokenizer.encode(part)]

    def collect(self, seconds: float) -> list[tuple[int, Completion]]:
        number = min(self.running)
        self.running.pop(number)
        return [(number, Completion.of(self._tokens, [-0.5] * len(self._tokens), "stop", 3))]


@pytest.fixture
def answers(run: Callable[..., list[Episode]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """(policy, parser) -> the messages that answer two requests with a tool, and one without."""
    pytest.importorskip("renderers")

    def answers(policy: Writes, name: str) -> list[Any]:
        monkeypatch.setattr(test_agents, "tokenizer_of", lambda template: policy.tokenizer)
        found: list[Any] = []

        def agent(base_url: str) -> float:
            [choice] = post(base_url, "chat/completions", messages=[user("x")], tools=[TOOL])["choices"]
            found.append(choice["message"] | {"problem": choice.get("parse_error")})
            found.append(ask(base_url, [user("x"), found[0], {"role": "tool", "content": "9"}], tools=[TOOL]))
            found.append(ask(base_url, [user("z")]))
            return 1.0

        run(agent, policy, parser=name)
        return found

    return answers


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_the_form_of_a_family_is_found(answers: Callable[..., list[Any]], name: str) -> None:
    thought = "" if name == "hermes" else "<think>\nhm\n</think>\n\n"
    first, second, without = answers(Writes(name, f"{thought}Let me see.\n{CALLS[name]}"), name)
    [call] = first["tool_calls"]
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 2, "note": "7"}
    assert first["content"] == "Let me see."
    assert first.get("reasoning_content", "").strip() == ("" if name == "hermes" else "hm")
    assert second["tool_calls"][0]["id"] != call["id"]
    assert "tool_calls" not in without


@pytest.mark.parametrize("name", WORDS)
def test_a_text_that_only_looks_like_a_call_is_none(answers: Callable[..., list[Any]], name: str) -> None:
    first, *_ = answers(Writes(name, CALLS[name], spelled=True), name)
    assert "tool_calls" not in first
    # GLM-4.5 thinks until it says that it has ended.
    assert "add" in first["content"] + first.get("reasoning_content", "")


def test_of_malformed_calls_the_agent_sees_the_text(answers: Callable[..., list[Any]]) -> None:
    broken = CALLS["qwen3.5"] + "<tool_call>\n<function="
    first, *_ = answers(Writes("qwen3.5", broken), "qwen3.5")
    assert (first.get("tool_calls"), first["content"]) == (None, broken)
    assert first["problem"].startswith("a call cannot be read: ")


@pytest.mark.parametrize(
    ("name", "message"),
    [("qwen9", "No renderer config registered for name='qwen9'"), ("auto", "name a family"), ("qwen3", "not found")],
)
def test_a_parser_must_fit_the_tokenizer(name: str, message: str) -> None:
    pytest.importorskip("renderers")
    with pytest.raises(ValueError, match=f"environment.parser='{name}'.*{message}"):
        load_parser(name, tokenizer_of())
