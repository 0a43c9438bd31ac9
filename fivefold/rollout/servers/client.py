"""A client for JSON over HTTP to a server on this machine, which many threads may use at once."""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError, TimeoutError

from fivefold.json_text import parsed

HOST = "127.0.0.1"
Address = int | Path
"""A port of `HOST`, or a Unix socket."""
KEY = "FIVEFOLD_SERVER_KEY"
"""Variable by which a server that listens on a port gets the key that it asks for."""
HEALTH_S = 10.0
"""Seconds that a server has to say that it is ready."""
SHOWN = 2000
"""Number of characters of a refusal that an error message repeats."""


class ServerGone(RuntimeError):
    """The connection to a server broke, as happens when the server dies."""


class ServerHangs(ServerGone):
    """A server did not reply within the time limit of a request."""


class ServerRefused(RuntimeError):
    """A server answered that it did not do what it was asked for."""

    def __init__(self, path: str, status: int, reason: str) -> None:
        super().__init__(f"the server refused {path} with status {status}: {reason}")
        self.is_its_own_fault = status >= 500
        """Whether the server itself failed, and the request was right."""


class _SocketConnection(HTTPConnection):
    """A connection over a Unix socket."""

    def __init__(self, *args: Any, path: Path, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._path = path

    def _new_conn(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        # Not by Python's own time limit: with that, Linux refuses a connection for which a busy server's queue has no
        # room yet.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(self.timeout))
        try:
            connection.connect(str(self._path))
        except BlockingIOError as error:
            connection.close()
            raise ConnectTimeoutError(self, f"the server took no connection within {self.timeout:g} s") from error
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(None))
        return connection


def _timeval(seconds: float | None) -> bytes:
    """Return a time limit as the kernel reads it; None: there is none."""
    whole = int(seconds or 0)
    return struct.pack("@ll", whole, int(1_000_000 * ((seconds or 0) - whole)))


class _SocketPool(urllib3.HTTPConnectionPool):
    """Connections over a Unix socket, the pool's `path`."""

    ConnectionCls = _SocketConnection


class HttpClient:
    """Connections to one server. No request is sent twice."""

    def __init__(self, address: Address, n_connections: int, limit_s: float, key: str | None = None) -> None:
        """Prepare the connections.

        Args:
            address: where the server listens.
            n_connections: number of threads that may wait for replies at one time.
            limit_s: most seconds until the reply to a `post` or `get` that has no other limit.
            key: what the server asks for; None: nothing.
        """
        self._limit_s = limit_s
        headers = None if key is None else {"Authorization": f"Bearer {key}"}
        options: dict[str, Any] = {"maxsize": n_connections, "block": True, "retries": False, "headers": headers}
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
        """Post `body` as JSON to `path`; return the JSON of the reply, None if that is empty.

        Raises as `send`, and RuntimeError if the reply is no JSON.
        """
        return self._json("POST", path, {} if body is None else body, limit_s)

    def get(self, path: str, limit_s: float | None = None) -> Any:
        """Return the JSON at `path`. Raises as `post`."""
        return self._json("GET", path, None, limit_s)

    def _json(self, method: str, path: str, body: Any, limit_s: float | None) -> Any:
        reply = self.send(method, path, body, self._limit_s if limit_s is None else limit_s)
        return json_of(reply, path) if reply else None

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
            ServerRefused: the server refused the request.
        """
        try:
            timeout = urllib3.Timeout(connect=limit_s, read=limit_s)
            reply = self._pool.request(method, path, json=body, timeout=timeout)
        except urllib3.exceptions.HTTPError as error:
            if isinstance(error, TimeoutError) and not isinstance(error, NewConnectionError):
                raise ServerHangs(f"the server did not reply to {path} within {limit_s:g} s") from error
            raise ServerGone(f"the connection to the server broke during {path}: {error}") from error
        if reply.status != 200:
            raise ServerRefused(path, reply.status, _shown(reply.data))
        return reply.data


def json_of(text: bytes, path: str) -> Any:
    """Return the value of JSON that came from `path`.

    Raises:
        RuntimeError: it is not JSON.
    """
    try:
        return parsed(text)
    except ValueError as error:
        raise RuntimeError(f"the server's reply to {path} is not JSON ({error}): {_shown(text)}") from error


def _shown(text: bytes) -> str:
    return text.decode(errors="replace")[:SHOWN]
