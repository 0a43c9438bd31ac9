"""A client for JSON over HTTP to a server on this machine, which many threads may use at once."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection

HOST = "127.0.0.1"
Address = int | Path
"""A port of `HOST`, or a Unix socket."""
CONNECT_S = 10.0
"""Seconds that a connection may take."""
HEALTH_S = 10.0
"""Seconds that a server has to say that it is ready."""
SHOWN = 2000
"""Number of characters of a refusal that an error message repeats."""


class ServerGone(RuntimeError):
    """The connection to a server broke, as happens when the server dies."""


class ServerHangs(ServerGone):
    """A server did not reply within the time limit of a request."""


class _SocketConnection(HTTPConnection):
    """A connection over a Unix socket."""

    def __init__(self, *args: Any, path: Path, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._path = path

    def _new_conn(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        # Without a time limit: with one, Linux refuses a connection for which a busy server's queue has no room yet.
        connection.connect(str(self._path))
        return connection


class _SocketPool(urllib3.HTTPConnectionPool):
    """Connections over a Unix socket, the pool's `path`."""

    ConnectionCls = _SocketConnection


class HttpClient:
    """Connections to one server. No request is sent twice, and not all have a time limit: the run has one."""

    def __init__(self, address: Address, n_connections: int) -> None:
        """Prepare the connections.

        Args:
            address: where the server listens.
            n_connections: number of threads that may wait for replies at one time.
        """
        options: dict[str, Any] = {"maxsize": n_connections, "block": True, "retries": False}
        self._pool = (
            urllib3.HTTPConnectionPool(HOST, address, **options)
            if isinstance(address, int)
            else _SocketPool("localhost", path=address, **options)
        )

    def is_healthy(self, limit_s: float | None = None, path: str = "/health") -> bool:
        """Return whether the server answers at `path` within `limit_s` seconds, or `HEALTH_S`, that it is well."""
        limit_s = HEALTH_S if limit_s is None else limit_s
        timeout = urllib3.Timeout(connect=limit_s, read=limit_s)
        try:
            return self._pool.request("GET", path, timeout=timeout).status == 200
        except urllib3.exceptions.HTTPError:  # the server does not listen yet, or hangs
            return False

    def post(self, path: str, body: Any = None, limit_s: float | None = None) -> Any:
        """Post `body` as JSON to `path`; return the JSON of the reply, None if that is empty. Raises as `send`."""
        return _parsed(self.send("POST", path, {} if body is None else body, limit_s))

    def get(self, path: str, limit_s: float | None = None) -> Any:
        """Return the JSON at `path`. Raises as `send`."""
        return _parsed(self.send("GET", path, limit_s=limit_s))

    def send(self, method: str, path: str, body: Any = None, limit_s: float | None = None) -> bytes:
        """Send a request, with `body` as JSON if there is one; return the reply as it came.

        Args:
            method: of HTTP.
            path: the endpoint.
            body: values for JSON; None: no body.
            limit_s: most seconds until the reply; None: any number.

        Raises:
            ServerHangs: there was no reply within `limit_s`.
            ServerGone: the connection broke.
            RuntimeError: the server refused the request.
        """
        try:
            timeout = urllib3.Timeout(connect=CONNECT_S, read=limit_s)
            reply = self._pool.request(method, path, json=body, timeout=timeout)
        except urllib3.exceptions.ReadTimeoutError as error:
            raise ServerHangs(f"the server did not reply to {path} within {limit_s:g} s") from error
        except urllib3.exceptions.HTTPError as error:
            raise ServerGone(f"the connection to the server broke during {path}: {error}") from error
        if reply.status != 200:
            text = reply.data.decode(errors="replace")[:SHOWN]
            raise RuntimeError(f"the server refused {path} with status {reply.status}: {text}")
        return reply.data


def _parsed(data: bytes) -> Any:
    return json.loads(data) if data else None
