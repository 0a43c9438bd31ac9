"""JSON over HTTP to a server on this machine, from many threads at once."""

from __future__ import annotations

import json
from typing import Any

import urllib3

HOST = "127.0.0.1"
SHOWN = 2000
"""Characters of a refusal that an error repeats."""


class ServerGone(RuntimeError):
    """The connection to a server broke, as it does where the server dies."""


class HttpClient:
    """Connections to one server. No request is sent twice, and none is given up: the run has its own time limit."""

    def __init__(self, port: int, n_connections: int) -> None:
        """`n_connections`: how many threads may wait for replies at one time."""
        self._pool = urllib3.HTTPConnectionPool(
            HOST, port, maxsize=n_connections, block=True, retries=False, timeout=urllib3.Timeout(connect=10, read=None)
        )

    def is_healthy(self) -> bool:
        """Whether the server answers, and says that it is ready."""
        try:
            return self._pool.request("GET", "/health").status == 200
        except urllib3.exceptions.HTTPError:  # it does not listen yet
            return False

    def post(self, path: str, body: Any = None) -> Any:
        """The JSON of the reply; None for an empty one.

        Raises:
            ServerGone: the connection broke.
            RuntimeError: the server refused.
        """
        try:
            reply = self._pool.request("POST", path, json={} if body is None else body)
        except urllib3.exceptions.HTTPError as error:
            raise ServerGone(f"the connection to the server broke during {path}: {error}") from error
        if reply.status != 200:
            text = reply.data.decode(errors="replace")[:SHOWN]
            raise RuntimeError(f"the server refused {path} with status {reply.status}: {text}")
        return json.loads(reply.data) if reply.data else None
