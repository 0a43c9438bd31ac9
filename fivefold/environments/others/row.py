"""What a row says of a game: its name, its options, and its seed.

{"prompt": "Play.", "extra_info": {"game": "FrozenLake-v1", "options": {"is_slippery": false}, "seed": 3}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GameOfRow:
    """One game of another project."""

    name: str
    """What the project calls it."""
    options: dict[str, Any]
    """Keyword arguments with which it is made."""
    seed: int
    """Seed of all that is random in it."""

    @classmethod
    def of(cls, extra_info: Mapping[str, Any], seed: int) -> GameOfRow:
        """Read the column `extra_info`.

        Args:
            extra_info: `game`, and perhaps `options` and `seed`.
            seed: the episode's, which differs among the samples of a prompt; a seed in the row makes them play the same
                game.

        Raises:
            ValueError: the row names no game.
        """
        name = extra_info.get("game")
        if not isinstance(name, str):
            raise ValueError(
                f"extra_info={dict(extra_info)!r} names no game: add the key game to the column extra_info"
            )
        own = extra_info.get("seed")
        # A file with options of several games gives each row the keys of all, with null.
        options = {key: value for key, value in (extra_info.get("options") or {}).items() if value is not None}
        return cls(name, options, seed if own is None else int(own))
