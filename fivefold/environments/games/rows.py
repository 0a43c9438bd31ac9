"""Rows for games that make their tasks themselves, by a seed: the recipe's `reader` of them reads no file.

path: games
reader: fivefold.environments.games.rows:rows
reader_kwargs: {games: {Lake: {game: frozen_lake, n: 1000, options: {is_slippery: false}}}, seed: 1}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fivefold.data.files import Row
from fivefold.environments.games.grid import board_of, told


def rows(path: str, split: str | None, games: Mapping[str, Mapping[str, Any]], seed: int = 0) -> Iterator[Row]:
    """Yield a row for each task; all samples of a prompt play the same.

    Args:
        path: not read.
        split: not read.
        games: by the name of a data source, `n` tasks of a game, with the further keys of its `extra_info`
            (`GridGame.reset`); `rules` replaces the game's text.
        seed: seed of the first task.

    Raises:
        ValueError: there is no such game, or it has not these options.
    """
    number = 0
    for source, keys in games.items():
        info = {name: value for name, value in keys.items() if name not in ("n", "rules")}
        board = board_of(str(info.get("game")), info.get("options") or {}, seed)
        text = keys.get("rules") or told(board)
        for _ in range(int(keys["n"])):
            yield {
                "data_source": source,
                "prompt": [{"role": "user", "content": text}],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {**info, "seed": seed + number},
            }
            number += 1
