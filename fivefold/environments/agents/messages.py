"""Anthropic's form over a session: `/messages`, with tools and streams, as a chat in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fivefold.environments.agents.chat import Chat, Message
from fivefold.environments.agents.session import Refused
from fivefold.json_text import parsed

_CHOICES = {"auto": "auto", "none": "none"}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def answer_messages(chat: Chat, body: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request to `/messages`.

    Raises:
        Refused: see `Chat.answer`; or a request of another form.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(f"messages={messages!r:.80} must be a list that is not empty")
    system = [{"role": "system", "content": _text(body["system"])}] if body.get("system") else []
    choice = (body.get("tool_choice") or {}).get("type", "auto")
    asked = {
        **{
            name: value
            for name, value in body.items()
            if name in ("model", "max_tokens", "temperature", "top_p", "top_k")
        },
        "messages": [*system, *(each for message in messages for each in _as_chat(message))],
        "tools": [_tool(tool) for tool in body.get("tools") or ()],
        "tool_choice": _CHOICES.get(choice, choice),
        "stop": body.get("stop_sequences"),
    }
    return _reply(await chat.answer(asked))


def _as_chat(message: Any) -> Iterator[Message]:
    """Yield a message as messages of a chat: results of tools are separate messages there."""
    if not isinstance(message, Mapping) or message.get("role") not in ("user", "assistant"):
        raise Refused(f"a message must have the role user or assistant: {message!r:.200}")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise Refused(f"the content of a message must be a text or blocks: {content!r:.80}")
    text, calls = [], []
    for block in blocks:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            text.append(block["text"])
        elif kind == "tool_use":
            function = {"name": block["name"], "arguments": block["input"]}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif kind == "tool_result":
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _text(block.get("content") or "")}
        else:
            raise Refused(f"blocks of the type {kind!r} are not supported: texts, tool_use and tool_result are")
    if text or calls:
        yield {"role": message["role"], "content": "".join(text), **({"tool_calls": calls} if calls else {})}


def _text(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    if strays := [block for block in content if block.get("type") != "text"]:
        raise Refused(f"only blocks of text are supported here, not {strays[0]!r:.80}")
    return "".join(block["text"] for block in content)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool.get("name"), "description": tool.get("description", "")}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema", {})}}


def _reply(chat: Mapping[str, Any]) -> dict[str, Any]:
    [choice] = chat["choices"]
    message, usage, stop = choice["message"], chat["usage"], choice.get("stop_reason")
    text = [{"type": "text", "text": message["content"]}] if message["content"] else []
    calls = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": parsed(call["function"]["arguments"]),
        }
        for call in message.get("tool_calls") or ()
    ]
    return {
        "id": chat["id"],
        "type": "message",
        "role": "assistant",
        "model": chat["model"],
        "content": [*text, *calls],
        "stop_reason": "stop_sequence" if stop else _REASONS[choice["finish_reason"]],
        "stop_sequence": stop,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }


def message_events(reply: Mapping[str, Any]) -> str:
    """Return a finished reply as the events of a stream: each block at once."""
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**reply, "content": [], "stop_reason": None}},
    ]
    for index, block in enumerate(reply["content"]):
        if block["type"] == "text":
            start: dict[str, Any] = {"type": "text", "text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            start = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        events += [
            {"type": "content_block_start", "index": index, "content_block": start},
            {"type": "content_block_delta", "index": index, "delta": delta},
            {"type": "content_block_stop", "index": index},
        ]
    ending = {"stop_reason": reply["stop_reason"], "stop_sequence": reply["stop_sequence"]}
    events += [
        {"type": "message_delta", "delta": ending, "usage": {"output_tokens": reply["usage"]["output_tokens"]}},
        {"type": "message_stop"},
    ]
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
