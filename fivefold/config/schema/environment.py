"""Environments: what plays episodes of several turns."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from fivefold.config.paths import user_path
from fivefold.config.schema.fields import Duration, NonNegative, OneLine, Positive, Section
from fivefold.config.schema.rules import absent, given, reads_if, rule

McpEntry = dict[str, OneLine]
"""An MCP server: `mcp` is its command or its URL, `cwd` the folder in which the command starts."""
OBSERVATION = "{observation}"
"""What stands for a game's answer in `turn_template`."""
HISTORY = "{history}"
"""What stands for earlier turns in `turn_template`."""
_OF_CHATS = reads_if(absent("game"), "has no effect on a game, whose moves are no chat")


def is_url(server: str) -> bool:
    """Return whether an MCP server is reached by HTTP, and not started by a command."""
    return server.startswith(("http://", "https://"))


class EnvironmentConfig(Section):
    """What plays the episodes (docs/agents.md): one of `game`, `tools` and `agent`."""

    game: OneLine | None = None
    """Class of a game, as `module:Class` or `file.py:Class`, with the methods `reset` and `step`: each completion is a
    move."""
    turn_template: Annotated[
        Annotated[str, Field(min_length=1)] | None, reads_if(given("game"), "is for the messages of a game")
    ] = None
    """A text with `{observation}`: the game is played in a chat, and each of its answers is a message of the user, as
    this text, which may have `{turn}`, `{turns_left}` and `{max_new_tokens}` too; null: an episode is one text."""
    memory: Annotated[NonNegative | None, reads_if(given("turn_template"), "is for the messages of a game")] = None
    """Turns before each turn that the model reads, as `{history}` in `turn_template`: a turn is then a separate chat,
    the row's prompt and this one message, which may have `{prompt}`, the row's last message, in the place that it has
    in the text, `{turns_done}` and `{turns_shown}` too. null: an episode is one chat, with all its turns."""
    tools: OneLine | list[OneLine | McpEntry] | None = None
    """What the model may call in a chat: a class, as `module:Class` or `file.py:Class`, whose public methods are tools,
    with `reset` and `reward`; or a list of functions, whose episodes `reward` judges. In the list, `python` runs
    programs of the model in a sandbox, and `{mcp: command}` or `{mcp: http://...}` is an MCP server with its tools."""
    agent: OneLine | None = None
    """Function of an agent, as `module:function` or `file.py:function`: it asks the model at an OpenAI-compatible
    `base_url`, and returns the reward."""
    max_turns: Positive = 8
    """Most completions of an episode; one that has not ended by then stops with `turns`."""
    max_length: Positive = 4096
    """Most tokens of an episode, the prompt included; one that has no room for another turn stops with `context`. With
    `memory`, most tokens of a turn and its prompt. `gconfig.max_new_tokens` limits each turn."""
    timeout_s: Duration = 60.0
    """Most seconds of one call of the game, whose episode a longer one fails; or of what an agent does in an episode
    besides waiting for the model, which then stops with `time` and reward 0."""
    parser: Annotated[OneLine, _OF_CHATS] = "hermes"
    """How answers are read in a chat: `hermes` finds calls of tools as JSON between `<tool_call>` tags. A name of the
    library renderers, such as `qwen3.5` or `glm-4.5`, finds a family's own calls, and parts thoughts from answers."""
    keep_thinking: Annotated[bool, _OF_CHATS] = False
    """Whether a chat keeps all that the model wrote in earlier turns, thoughts included, so that it stays one sequence.
    false: what the chat template keeps of it."""
    parse_errors: Annotated[
        Literal["end", "answer"], reads_if(given("tools"), "is for calls of tools, which an agent reads itself")
    ] = "end"
    """What becomes of an episode whose call of a tool cannot be read: `end` stops it with `parse`; with `answer`, the
    model reads what is wrong, as of a tool that fails, and may try again."""
    masked: list[Literal["turns", "context", "time", "parse"]] = []
    """Reasons to stop: no token of an episode that stopped for one of them is trained. Its reward still counts in the
    baseline of its group."""
    retries: NonNegative = 0
    """Times that an episode is played again whose environment has failed, as for a service that is away for a while; on
    another replica if there are several."""
    max_failed: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Largest share of a step's episodes that may fail, retries included. They leave their groups: neither a baseline
    nor the loss counts them. More end the run with the first error."""

    @rule
    def _one(self) -> Iterator[str]:
        if len(self._given) != 1:
            yield f"set one of game, tools and agent, and not {' and '.join(self._given) or 'none of them'}"
        if self.turn_template is not None and OBSERVATION not in self.turn_template:
            yield f"turn_template has no {OBSERVATION}, so the model would not see the game: write it into the text"
        yield from self._remembered()
        if self.tools == []:
            yield "tools=[] has no tool: name functions, or leave the section out"
        names = self.tools if isinstance(self.tools, list) else [*self._given.values()]
        for name in names:
            if isinstance(name, dict):
                yield from _problems(name)
            elif isinstance(name, str) and not all(name.rpartition(":")) and name != "python":
                yield f"{name!r} must have the form module:name or file.py:name"
        if self.tools == "python":
            yield "tools=python is one of a list of functions: write tools=[python]"

    def _remembered(self) -> Iterator[str]:
        text = self.turn_template or ""
        if self.memory and HISTORY not in text:
            yield f"memory={self.memory}, and turn_template has no {HISTORY}: write it into the text"
        for field in (HISTORY, "{prompt}", "{turns_shown}"):
            if self.memory is None and field in text:
                yield f"turn_template has {field}, which the messages of one chat lack: set memory"

    @property
    def _given(self) -> dict[str, Any]:
        keys = ("game", "tools", "agent")
        return {key: value for key in keys if (value := getattr(self, key)) is not None}

    @property
    def name(self) -> str:
        """The key that is set, and its value."""
        [(key, value)] = self._given.items()
        return f"environment.{key}={value!r}"

    @property
    def gives_rewards(self) -> bool:
        """Whether its episodes come with rewards."""
        return not isinstance(self.tools, list)

    def located(self, folder: Path) -> Self:
        """Return the section with its file found from `folder`, for processes with other working folders."""
        [(key, value)] = self._given.items()
        found = [_located(name, folder) for name in value] if isinstance(value, list) else _located(value, folder)
        return self.model_copy(update={key: found})


def _problems(entry: McpEntry) -> Iterator[str]:
    server = entry.get("mcp")
    if server is None or not entry.keys() <= {"mcp", "cwd"}:
        yield f"{entry} is no MCP server: write {{mcp: COMMAND}}, {{mcp: COMMAND, cwd: FOLDER}} or {{mcp: URL}}"
        return
    if is_url(server) and "cwd" in entry:
        yield f"{entry} has cwd, and a server that is reached by a URL runs elsewhere: drop it"
    try:
        shlex.split(server)
    except ValueError as error:
        yield f"mcp={server!r} is no command, which is split as a shell does: {error}"


def _located(name: str | McpEntry, folder: Path) -> str | McpEntry:
    if isinstance(name, dict):
        if is_url(name["mcp"]):
            return name
        # Any argument of a command may be a path, so the command itself starts there.
        return {**name, "cwd": str((folder / user_path(name.get("cwd", "."))).resolve())}
    path, _, what = name.rpartition(":")
    if path.endswith(".py") or "/" in path:
        return f"{(folder / Path(path).expanduser()).resolve()}:{what}"
    return name
