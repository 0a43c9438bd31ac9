"""Environments: what plays episodes of several turns."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from fivefold.config.schema.fields import Duration, OneLine, Positive, Section


class EnvironmentConfig(Section):
    """What plays the episodes: the model's answers are moves of a game (docs/agents.md)."""

    game: OneLine
    """Class of the game, as `module:Class` or `file.py:Class`, with the methods `reset` and `step`."""
    max_turns: Positive = 8
    """Most turns of an episode; one that has not ended by then stops with `turns`."""
    max_length: Positive = 4096
    """Most tokens of an episode, the prompt included; one that has no room for another turn stops with `context`.
    `gconfig.max_new_tokens` limits each turn."""
    timeout_s: Duration = 60.0
    """Most seconds of one call of the game. A longer one ends the run."""

    def located(self, folder: Path) -> Self:
        """Return the section with its file found from `folder`, for processes with other working folders."""
        path, _, name = self.game.rpartition(":")
        if path.endswith(".py") or "/" in path:
            return self.model_copy(update={"game": f"{(folder / Path(path).expanduser()).resolve()}:{name}"})
        return self
