"""Environments: what plays episodes of several turns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Self

from fivefold.config.schema.fields import Duration, OneLine, Positive, Section
from fivefold.config.schema.rules import rule


class EnvironmentConfig(Section):
    """What plays the episodes (docs/agents.md): either `game` or `agent`."""

    game: OneLine | None = None
    """Class of a game, as `module:Class` or `file.py:Class`, with the methods `reset` and `step`: each completion is a
    move."""
    agent: OneLine | None = None
    """Function of an agent, as `module:function` or `file.py:function`: it asks the model at an OpenAI-compatible
    `base_url`, and returns the reward."""
    max_turns: Positive = 8
    """Most completions of an episode; one that has not ended by then stops with `turns`."""
    max_length: Positive = 4096
    """Most tokens of an episode, the prompt included; one that has no room for another turn stops with `context`.
    `gconfig.max_new_tokens` limits each turn."""
    timeout_s: Duration = 60.0
    """Most seconds of one call of the game, which a longer one ends with the run; or of an agent's whole episode, which
    then stops with `time` and reward 0."""

    @rule
    def _one(self) -> Iterator[str]:
        if (self.game is None) == (self.agent is None):
            yield f"game={self.game} and agent={self.agent}: set one of them"

    @property
    def name(self) -> str:
        """The key that is set, and its value."""
        return f"environment.game={self.game!r}" if self.agent is None else f"environment.agent={self.agent!r}"

    def located(self, folder: Path) -> Self:
        """Return the section with its file found from `folder`, for processes with other working folders."""
        return self.model_copy(update={key: _located(getattr(self, key), folder) for key in ("game", "agent")})


def _located(name: str | None, folder: Path) -> str | None:
    path, _, what = (name or "").rpartition(":")
    if path.endswith(".py") or "/" in path:
        return f"{(folder / Path(path).expanduser()).resolve()}:{what}"
    return name
