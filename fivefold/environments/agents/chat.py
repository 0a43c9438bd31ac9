"""OpenAI's forms over a session: chat completions with tools, and completions of texts."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2

from fivefold.environments.agents.parsing import Answer
from fivefold.environments.agents.session import MODEL, Refused, Session, before_stop
from fivefold.environments.agents.tree import Continuation, Turn
from fivefold.json_text import parsed

_MARK = "\ue000answer\ue001"
"""Stands for an answer whose text a template must not see; templates may strip or split ordinary text."""

Message = dict[str, Any]


class Chat:
    """The messages of one session, with the sampled text of each answer."""

    def __init__(self, session: Session) -> None:
        """Begin without a message."""
        self._session = session
        self._answered: list[_Answered] = []

    async def answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request to `/chat/completions`.

        Raises:
            Refused: see `Session.complete`; or messages of another form, or ones that the chat template refuses.
        """
        messages = [_canonical(message) for message in _list(body, "messages")]
        tools = body.get("tools") or None
        if body.get("tool_choice", "auto") not in ("auto", "none", None):
            raise Refused(f"tool_choice={body['tool_choice']!r} is not supported: the policy chooses (auto), or none")
        if (form := body.get("response_format")) and form.get("type", "text") != "text":
            raise Refused(f"response_format={form!r} is not supported: leave it out")
        if body.get("tool_choice") == "none":
            tools = None
        answers = [self._answer(messages[:number], message) for number, message in enumerate(messages)]
        text = self._rendered(messages, answers, tools)
        turn = await self._session.complete(
            text, body, has_special_tokens=True, written=lambda asked: _contents(messages, answers, asked)
        )
        answer = self._session.parser(turn, tools or ())
        if tools and not any(each.turn is turn for each in self._answered):
            self._session.n_calls = (self._session.n_calls or 0) + len(answer.calls)
        content, stop = before_stop(answer.content, body)
        message = _message(replace(answer, content=content), len(self._answered))
        reason = "tool_calls" if "tool_calls" in message else turn.completion.finish_reason
        self._answered.append(_Answered(messages, _canonical(message), turn))
        choice = {"message": message, "finish_reason": reason, **({} if stop is None else {"stop_reason": stop})}
        choice |= {} if answer.problem is None else {"parse_error": answer.problem}
        return reply_of("chat.completion", body, turn, choice)

    def _rendered(self, messages: Sequence[Message], answers: Sequence[Turn | None], tools: Any) -> str:
        """Return messages as a text. Answers are written as they were sampled, however a client repeats them."""
        as_sampled = [
            {name: value for name, value in message.items() if value is not None}
            if answer is None
            else {"role": "assistant", "content": answer.visible_text}
            for message, answer in zip(messages, answers, strict=True)
        ]
        answered = [(number, answer) for number, answer in enumerate(answers) if answer is not None]
        if not self._session.keeps_thinking or not answered:
            return self._by_template(as_sampled, tools)
        last, kept = answered[-1]
        as_sampled[last] = {"role": "assistant", "content": _MARK}
        _, mark, after = self._by_template(as_sampled, tools).rpartition(_MARK)
        if not mark:
            raise Refused(
                "environment.keep_thinking=true needs a chat template that writes every answer: set it to false"
            )
        return kept.before_text + kept.visible_text + after

    def _by_template(self, messages: Sequence[Message], tools: Any) -> str:
        tokenizer = self._session.tokenizer
        if not tokenizer.chat_template:
            raise Refused("the tokenizer has no chat template: ask /completions with a text, or use an instruct model")
        try:
            return str(
                tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, add_generation_prompt=True)
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise Refused(f"the chat template refuses the messages: {error}") from error

    def _answer(self, before: Sequence[Message], message: Message) -> Turn | None:
        """Return what was sampled as a message of the client's; None: the client made it."""
        same = (each.turn for each in self._answered if each.before == list(before) and each.message == message)
        return next(same, None)


def _contents(messages: Sequence[Message], answers: Sequence[Turn | None], asked: Continuation) -> list[str]:
    """Return the contents of messages among the new tokens of a request: after the last answer that it continues."""
    known = [number for number, turn in enumerate(answers) if turn is not None and turn is asked.before]
    return [message["content"] for message in messages[known[-1] + 1 if known else 0 :]]


@dataclass(frozen=True)
class _Answered:
    before: list[Message]
    message: Message
    """What the client got."""
    turn: Turn


async def complete_text(session: Session, body: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a request to `/completions`.

    Raises:
        Refused: see `Session.complete`; or the prompt is no text.
    """
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise Refused(f"prompt={prompt!r:.80} must be one text")
    turn = await session.complete(prompt, body, has_special_tokens=False)
    text, stop = before_stop(turn.visible_text, body)
    choice = {"text": text, "finish_reason": turn.completion.finish_reason}
    choice |= {} if stop is None else {"stop_reason": stop}
    return reply_of("text_completion", body, turn, choice)


def events(reply: Mapping[str, Any]) -> str:
    """Return a finished reply as the events of a stream: all of it at once, and the end."""
    [choice] = reply["choices"]
    chunk = dict(reply)
    if "message" in choice:
        calls = [{"index": number, **call} for number, call in enumerate(choice["message"].get("tool_calls") or ())]
        delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
        chunk["object"] = "chat.completion.chunk"
        chunk["choices"] = [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}]
    return f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if not isinstance(value, list) or not value:
        raise Refused(f"{name}={value!r:.80} must be a list that is not empty")
    return value


def _canonical(message: Any) -> Message:
    """Return a message in the one form in which messages are compared and rendered.

    Clients repeat messages in other forms: content null or in parts, arguments as a text of JSON in another order.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise Refused(f"a message must have a role: {message!r:.200}")
    content = message.get("content")
    if isinstance(content, list):
        if strays := [part for part in content if not isinstance(part, Mapping) or part.get("type") != "text"]:
            raise Refused(f"only parts of text are supported, not {strays[0]!r:.80}")
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise Refused(f"the content of a message must be a text: {content!r:.80}")
    calls = [_canonical_call(call) for call in message.get("tool_calls") or ()]
    names = ("name", "tool_call_id") if message["role"] == "tool" else ("name",)
    return {
        "role": "system" if message["role"] == "developer" else message["role"],
        "content": content or "",
        "tool_calls": calls or None,
        **{name: message.get(name) for name in names},
    }


def _canonical_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Refused(f"a tool call must have a function with a name: {call!r:.200}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = parsed(arguments)
        except ValueError as error:
            raise Refused(f"the arguments of a tool call are no JSON: {error}") from error
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _message(answer: Answer, number: int) -> Message:
    """Return an answer as the client gets it, the `number`-th of its session."""
    message: Message = {"role": "assistant", "content": answer.content}
    if answer.thoughts is not None:
        message["reasoning_content"] = answer.thoughts
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {
                "id": f"call_{number}_{place}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for place, (name, arguments) in enumerate(answer.calls)
        ]
    return message


def reply_of(kind: str, body: Mapping[str, Any], turn: Turn, choice: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply to a request: one choice, and the counts of its tokens.

    Args:
        kind: OpenAI's name of its form.
        body: the request.
        turn: what was sampled.
        choice: the answer in the request's form.
    """
    n_prompt, n_sampled = len(turn.token_ids) - len(turn.completion.token_ids), len(turn.completion.token_ids)
    ids: dict[str, Any] = {}
    if body.get("return_token_ids"):
        ids = {"token_ids": turn.completion.token_ids.tolist()}
    return {
        "id": f"turn-{id(turn):x}",
        "object": kind,
        "created": int(time.time()),
        "model": body.get("model") or MODEL,
        "choices": [{"index": 0, **choice, **ids}],
        "usage": {"prompt_tokens": n_prompt, "completion_tokens": n_sampled, "total_tokens": n_prompt + n_sampled},
        **({"prompt_token_ids": turn.token_ids[:n_prompt]} if ids else {}),
    }
