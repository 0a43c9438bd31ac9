"""Tools: the model calls functions, or methods of an object, until it answers without a call.

messages ─> model ─┬─ calls ─> tools ─> their results as messages ─> model ...
                   └─ an answer without a call: the episode is done, and the object says its reward
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException, get_json_schema

from fivefold.config.schema.environment import EnvironmentConfig, McpEntry
from fivefold.config.user_code import load_user_object
from fivefold.environments.agents.chat import Chat
from fivefold.environments.agents.parsing import load_parser
from fivefold.environments.agents.python_tool import check_python, python
from fivefold.environments.agents.session import Refused, Session
from fivefold.environments.environment import Client, Task
from fivefold.environments.given_rewards import in_the_end, named_rewards
from fivefold.environments.user_code import EnvironmentFailed, UserCalls, load_class, row_arguments
from fivefold.json_text import parsed
from fivefold.types import Episode, Prompt, StopReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "environment.tools"
_OWN = ("reset", "reward")
"""Methods of a class that are no tools."""


def load_tools(tools: str | Sequence[str | McpEntry]) -> type[Any] | list[Callable[..., Any]]:
    """Import the recipe's tools: a class, or functions. MCP servers start, and end with the last of their tools.

    Raises:
        ValueError: something cannot be imported, is no tool, or has no docstring and types from which a schema follows;
            a server does not start; or two tools have one name.
    """
    if isinstance(tools, str):
        found = load_class(KEY, tools, {"reset": (), "reward": ()})
        schemas_of(tools, _methods(found))
        return found
    functions: dict[str, Callable[..., Any]] = {}
    for entry in tools:
        for function in _load_entry(entry):
            name = function.__name__
            if name in functions:
                raise ValueError(
                    f"{KEY}={_shown(tools)!r} has two tools {name!r}, and a call names one: drop one of them"
                )
            functions[name] = function
    schemas_of(_shown(tools), [*functions.values()])
    return [*functions.values()]


def _load_entry(entry: str | McpEntry) -> list[Callable[..., Any]]:
    """Return the tools of an entry in the recipe's list."""
    if isinstance(entry, dict):
        from fivefold.environments.agents.mcp_tools import McpServer

        return McpServer(entry).tools()
    if entry == "python":
        check_python()
        return [python]
    function = load_user_object(KEY, entry)
    if not inspect.isroutine(function):
        raise ValueError(f"{KEY}={entry!r} is a {type(function).__name__}: name a function, or one class alone")
    return [function]


def _shown(tools: Sequence[str | McpEntry]) -> str:
    return ", ".join(entry["mcp"] if isinstance(entry, dict) else entry for entry in tools)


def schemas_of(name: str, functions: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return the JSON schemas of tools, from their types and docstrings; the tools of MCP servers bring theirs.

    Raises:
        ValueError: there is no tool, or a type or a description is missing.
    """
    if not functions:
        raise ValueError(f"{KEY}={name!r} has no tool: public methods besides {' and '.join(_OWN)} are tools")
    schemas = []
    for function in functions:
        try:
            schema = getattr(function, "tool_schema", None) or get_json_schema(function)
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise ValueError(
                f"{KEY}={name!r}: {error}. The model learns of a tool by its types and by its docstring, whose Args "
                "describe each argument"
            ) from error
        schema["function"].pop("return", None)
        schemas.append(schema)
    return schemas


def _methods(kind: Any) -> list[Callable[..., Any]]:
    """Return the methods of a class or an object that are tools, in the order of their names."""
    members = inspect.getmembers(kind, callable)
    return [method for name, method in members if not name.startswith("_") and name not in _OWN]


class Tools:
    """Lets the model call tools (`Environment`); of a class, each episode has a separate object."""

    def __init__(self, config: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Import the tools.

        Raises:
            ValueError: as `load_tools`; or the tokenizer has no chat template, or one that leaves tools out.
        """
        assert config.tools is not None
        self._tools = load_tools(config.tools)
        self._config = config
        self._tokenizer = tokenizer
        self._parser = load_parser(config.parser, tokenizer)
        self._calls = UserCalls(KEY, str(config.tools), config.timeout_s)
        check_template(tokenizer, config)

    async def run(self, task: Task, client: Client) -> Episode:
        """Let the model answer, with as many calls of tools as it makes.

        Raises:
            EnvironmentFailed: the object could not be made, reset or asked for its reward.
        """
        prompt, call = task.prompt, self._calls.call
        messages = [*prompt.chat]
        game = None
        functions: Sequence[Callable[..., Any]]
        if isinstance(self._tools, list):
            functions = self._tools
        else:
            game = await call(prompt, self._tools)
            functions = _methods(game)
            opening = await call(prompt, game.reset, **row_arguments(game.reset, prompt, task.request.seed))
            messages = self._opened(prompt, game.reset, messages, opening)
        session = Session(task, client, self._tokenizer, self._config, self._parser)
        reason: StopReason = "done"
        try:
            reason = await self._converse(prompt, Chat(session), messages, {each.__name__: each for each in functions})
        except Refused as refusal:
            if session.ended_by is None or not session.tree.turns:
                raise ValueError(f"{KEY}, in an episode of prompt {prompt.index + 1}: {refusal}") from refusal
        finally:
            session.close()
        rewards = [] if game is None else [self._rewards(prompt, game.reward, await call(prompt, game.reward))]
        return session.episode(reason, in_the_end(rewards, len(session.tree.turns)))

    async def _converse(
        self, prompt: Prompt, chat: Chat, messages: list[Any], functions: Mapping[str, Callable[..., Any]]
    ) -> StopReason:
        """Let the model answer until it calls no tool. Return why it ended."""
        schemas = schemas_of(str(self._config.tools), list(functions.values()))
        while True:
            reply = await chat.answer({"messages": messages, "tools": schemas})
            choice = reply["choices"][0]
            message = choice["message"]
            messages.append(message)
            if problem := choice.get("parse_error"):
                if self._config.parse_errors == "end":
                    return "parse"
                messages.append(error_message(problem))
                continue
            if not message.get("tool_calls"):
                return "done"
            for call in message["tool_calls"]:
                result = await self._result(prompt, functions, call["function"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    async def _result(
        self, prompt: Prompt, functions: Mapping[str, Callable[..., Any]], asked: Mapping[str, Any]
    ) -> str:
        """Return what a tool returns as a text; its error, if it raises one, for the model to see."""
        function = functions.get(asked["name"])
        if function is None:
            return f"Error: there is no tool {asked['name']!r}: use {', '.join(functions)}"
        try:
            value = await self._calls.call(prompt, function, **parsed(asked["arguments"]))
        except EnvironmentFailed as failure:
            if failure.is_late:
                return f"Error: {function.__name__} took longer than {self._config.timeout_s:g} s"
            return f"Error: {failure.__cause__!r}"
        return value if isinstance(value, str) else json.dumps(value, default=str)

    def _opened(self, prompt: Prompt, reset: Callable[..., Any], messages: list[Any], opening: object) -> list[Any]:
        """Return the messages with the text of `reset` at the end of the last one."""
        if opening is None:
            return messages
        if not isinstance(opening, str):
            raise self._calls.other_form(prompt, reset, opening, "a text, or nothing")
        *before, last = messages
        return [*before, {**last, "content": f"{last['content']}{opening}"}]

    def _rewards(self, prompt: Prompt, reward: Callable[..., Any], value: Any) -> Mapping[str, float]:
        rewards = named_rewards(value)
        if not rewards:
            raise self._calls.other_form(prompt, reward, value, "a finite reward, or finite rewards by name")
        return rewards


def error_message(problem: str) -> dict[str, str]:
    """Return what the model reads after a call that could not be read, which has no id to answer."""
    return {"role": "tool", "content": f"Error: {problem}"}


def check_template(tokenizer: PreTrainedTokenizerBase, config: EnvironmentConfig) -> None:
    """Refuse a chat template that does not write tools into the prompt: the model would never learn of them.

    Raises:
        ValueError: there is no template, it leaves them out, or it refuses what answers a call that cannot be read.
    """
    problem = f"{KEY} needs a chat template with tools, and the tokenizer of {tokenizer.name_or_path!r} has "
    if not tokenizer.chat_template:
        raise ValueError(f"{problem}none: use an instruct model, or environment.game with texts")
    schema = {"type": "function", "function": {"name": "a_tool_of_fivefold", "parameters": {"type": "object"}}}
    chat = [{"role": "user", "content": "x"}]
    if "a_tool_of_fivefold" not in str(tokenizer.apply_chat_template(chat, tools=[schema], tokenize=False)):
        raise ValueError(f"{problem}one that leaves them out: use a model that was trained to call tools")
    if config.parse_errors == "answer":
        said = [*chat, {"role": "assistant", "content": "x"}, error_message("x")]
        try:
            tokenizer.apply_chat_template(said, tools=[schema], tokenize=False)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ValueError(
                f"{KEY}: the chat template of {tokenizer.name_or_path!r} refuses a tool's message that answers no call "
                f"({error}): set environment.parse_errors=end"
            ) from error
