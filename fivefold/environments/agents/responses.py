"""OpenAI's Responses form over a session: `/responses`, with tools and streams, as a chat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from fivefold.environments.agents.chat import Chat, Message
from fivefold.environments.agents.session import Refused


async def answer_response(chat: Chat, body: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request to `/responses`.

    Raises:
        Refused: see `Chat.answer`; or items of another form, or state that a session does not keep.
    """
    for name in ("previous_response_id", "conversation", "background"):
        if body.get(name):
            raise Refused(f"{name} is not supported: send the whole conversation as input")
    tools = body.get("tools") or []
    if strays := [tool for tool in tools if tool.get("type") != "function"]:
        raise Refused(f"tools of the type {strays[0].get('type')!r} are not supported: functions are")
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not items:
        raise Refused(f"input={given!r:.80} must be a text, or a list that is not empty")
    instructions = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    asked = {
        **{name: value for name, value in body.items() if name in ("model", "temperature", "top_p", "tool_choice")},
        "messages": [*instructions, *_as_chat(items)],
        "tools": [{"type": "function", "function": _function(tool)} for tool in tools],
        "max_tokens": body.get("max_output_tokens"),
    }
    return _reply(await chat.answer(asked), body)


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}


def _as_chat(items: list[Any]) -> list[Message]:
    """Return items as messages of a chat: a text and the calls that follow it are one message there."""
    messages: list[Message] = []
    for item in items:
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _text(item.get("content"))})
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(
                {"id": item["call_id"], "type": "function", "function": function}
            )
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
        else:
            raise Refused(f"items of the type {kind!r} are not supported: messages, calls and their outputs are")
    return messages


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if strays := [part for part in parts if not isinstance(part, Mapping) or not isinstance(part.get("text"), str)]:
        raise Refused(f"only texts are supported, not {strays[0]!r:.80}")
    return "".join(part["text"] for part in parts)


def _reply(chat: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    [choice] = chat["choices"]
    message, usage, name = choice["message"], chat["usage"], chat["id"]
    is_cut = choice["finish_reason"] == "length"
    output: list[dict[str, Any]] = []
    if message["content"]:
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        output.append(
            {"type": "message", "id": f"msg-{name}", "role": "assistant", "status": "completed", "content": [part]}
        )
    output += [
        {
            "type": "function_call",
            "id": f"fc-{call['id']}",
            "call_id": call["id"],
            "status": "completed",
            **call["function"],
        }
        for call in message.get("tool_calls") or ()
    ]
    return {
        "id": f"resp-{name}",
        "object": "response",
        "created_at": chat["created"],
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "model": chat["model"],
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def response_events(reply: Mapping[str, Any]) -> str:
    """Return a finished reply as the events of a stream: each item at once."""
    events = [
        {**event, "sequence_number": number}
        for number, event in enumerate(
            [
                {"type": "response.created", "response": {**reply, "status": "in_progress", "output": []}},
                *(event for index, item in enumerate(reply["output"]) for event in _item_events(index, item)),
                {"type": f"response.{reply['status']}", "response": reply},
            ]
        )
    ]
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


def _item_events(index: int, item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    place = {"output_index": index, "item_id": item["id"]}
    if item["type"] == "message":
        [part] = item["content"]
        empty = {**part, "text": ""}
        within = {**place, "content_index": 0}
        yield {"type": "response.output_item.added", **place, "item": {**item, "content": [], "status": "in_progress"}}
        yield {"type": "response.content_part.added", **within, "part": empty}
        yield {"type": "response.output_text.delta", **within, "delta": part["text"], "logprobs": []}
        yield {"type": "response.output_text.done", **within, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **within, "part": part}
    else:
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", **place, "item": begun}
        yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
        yield {
            "type": "response.function_call_arguments.done",
            **place,
            "name": item["name"],
            "arguments": item["arguments"],
        }
    yield {"type": "response.output_item.done", **place, "item": item}
