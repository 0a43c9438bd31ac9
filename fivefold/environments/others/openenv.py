"""OpenEnv: an environment behind a server that runs already.

{"prompt": "Guess.", "extra_info": {"game": "http://127.0.0.1:8000", "move_key": "number", "text_key": "text"}}
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from fivefold.environments.others.package import imported
from fivefold.environments.others.row import GameOfRow

openenv = imported("openenv.core", "openenv")

_INVALID = "VALIDATION_ERROR"
"""By which the server says that an action has another form."""


class RemoteGame:
    """Sends each move to the server as an action, and shows the observation; each episode is a session of the server.

    The server needs as many sessions at the same time as the run has episodes, and its environment must draw what is
    random from the seed that `reset` gets.
    """

    def reset(self, extra_info: Mapping[str, Any], seed: int) -> str:
        """Open a session, and begin.

        Args:
            extra_info: `game`, the address; `options`, further arguments of the environment's reset; `move_key`, the
                field of an action that is the move, without which a move is an action as JSON; `text_key`, the field of
                an observation that is shown, without which it is shown as JSON.
            seed: seed of the episode.

        Raises:
            ValueError: the row names no address.
            ConnectionError: no server answers there.
        """
        game = GameOfRow.of(extra_info, seed)
        self._move_key, self._text_key = extra_info.get("move_key"), extra_info.get("text_key")
        self._client = openenv.GenericEnvClient(base_url=game.name).sync()
        # Not in this thread: to close means to wait for the server. Some episodes end without the last step.
        self._close = weakref.finalize(self, _close_later, self._client)
        self._client.connect()
        return self._shown(self._client.reset(seed=game.seed, **game.options).observation)

    def step(self, move: str) -> tuple[str, float, bool]:
        """Send a move. One that is no action of the environment is answered, and changes nothing."""
        try:
            result = self._client.step(self._action(move))
        except ValueError as error:
            return f"\nThat is no action: {error}\n", 0.0, False
        except RuntimeError as error:
            if _INVALID not in str(error):
                raise
            return "\nThat is no action of this environment.\n", 0.0, False
        if result.done:
            self._close()
        return self._shown(result.observation), float(result.reward or 0.0), bool(result.done)

    def _action(self, move: str) -> dict[str, Any]:
        if self._move_key is not None:
            return {self._move_key: move.strip()}
        action = json.loads(move)
        if not isinstance(action, dict):
            raise ValueError("write an object in JSON")
        return action

    def _shown(self, observation: Mapping[str, Any]) -> str:
        text = json.dumps(observation) if self._text_key is None else str(observation[self._text_key])
        return f"\n{text}\n"


def _close_later(client: Any) -> None:
    threading.Thread(target=client.close, daemon=True).start()
