"""Reads what a model wrote as a message: its text, its thoughts, and the tools that it calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fivefold.environments.agents.tree import Turn
from fivefold.json_text import parsed_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "environment.parser"
HERMES = "hermes"
_NO_FAMILY = ("auto", "default")
"""Names of renderers that look a model up by its hub name, or read nothing."""
_BEGIN, _END = "<tool_call>", "</tool_call>"
_CALL = re.compile(f"{_BEGIN}(.*?){_END}", re.DOTALL)
"""A call in the form that Qwen's and Hermes' templates teach."""


@dataclass(frozen=True)
class Answer:
    """An answer as a client gets it."""

    content: str
    thoughts: str | None = None
    """None: they are part of the content, if there are any."""
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """Name and arguments of each call."""
    problem: str | None = None
    """What is wrong with a call that could not be read; None: nothing is."""


Parser = Callable[[Turn, Sequence[Mapping[str, Any]]], Answer]
"""Takes a turn, and the JSON schemas of the tools that it may call. If one call is malformed, none is read: the agent
sees the text, and may tell the model what is wrong with it."""


def load_parser(name: str, tokenizer: PreTrainedTokenizerBase) -> Parser:
    """Return the parser of a recipe.

    Raises:
        ValueError: the library renderers is missing, has no such parser, or one for another tokenizer.
    """
    if name == HERMES:
        return hermes
    try:
        from renderers import config_from_name, create_renderer
    except ImportError as error:
        raise ValueError(
            f"{KEY}={name!r} needs the library renderers: pip install 'fivefold[renderers]', or set it to {HERMES}"
        ) from error
    if name in _NO_FAMILY:
        raise ValueError(f"{KEY}={name!r} must be {HERMES}, or name a family of the library renderers")
    try:
        renderer = create_renderer(tokenizer, config_from_name(name))
    except (AssertionError, ValueError) as error:
        raise ValueError(f"{KEY}={name!r}: {error}. It must be {HERMES}, or the family of the tokenizer") from error
    return lambda turn, tools: _by_renderer(renderer, turn, tools)


def hermes(turn: Turn, tools: Sequence[Mapping[str, Any]]) -> Answer:
    """Read calls as JSON between `<tool_call>` and `</tool_call>`; thoughts stay in the content."""
    text = turn.visible_text
    if not tools:
        return Answer(text)
    if _BEGIN not in text:
        return Answer(text)
    rest = _CALL.sub("", text)
    if _BEGIN in rest:
        return Answer(text, problem=f"a call has no end, {_END}")
    try:
        calls = tuple(_json_call(found[1]) for found in _CALL.finditer(text))
    except ValueError as error:
        return Answer(text, problem=str(error))
    return Answer(rest.strip(), calls=calls)


def _json_call(text: str) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the arguments of a call.

    Raises:
        ValueError: it is none.
    """
    try:
        call = parsed_object(text)
    except ValueError as error:
        raise ValueError(f"a call is no object of JSON: {error}") from error
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError('a call must be {"name": a text, "arguments": an object}')
    return name, arguments


def _by_renderer(renderer: Any, turn: Turn, tools: Sequence[Mapping[str, Any]]) -> Answer:
    """Read tokens as a renderer of the library does: a text that only looks like a call is none."""
    sampled = turn.completion.token_ids.tolist()
    before = turn.token_ids[: -len(sampled)] if sampled else turn.token_ids
    found = renderer.parse_response(sampled, tools=[tool["function"] for tool in tools] or None, prompt_ids=before)
    calls = [(call.name, call.arguments) for call in found.tool_calls if call.status == "ok"]
    if len(calls) < len(found.tool_calls) or not all(isinstance(arguments, dict) for _, arguments in calls):
        wrong = ", ".join(sorted({str(call.status) for call in found.tool_calls if call.status != "ok"}))
        problem = f"a call cannot be read: {wrong or 'its arguments are no object'}"
        return Answer(turn.visible_text, problem=problem if tools else None)
    return Answer(found.content, found.reasoning_content, tuple(calls) if tools else ())
