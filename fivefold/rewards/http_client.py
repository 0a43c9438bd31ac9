"""Asks a service by POST with JSON: one request at a time for each thread, sent again if it fails."""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import urllib3

from fivefold.rewards.asking import NoScore

Answer = TypeVar("Answer")

SHOWN = 300
"""Most characters of a reply that an error shows."""
LONGEST_REPLY = 16 << 20
"""Most bytes of a reply."""
CONNECT_S = 10.0
"""Seconds in which a service must take a connection before a run."""
LONGEST_WAIT_S = 60.0
"""Most seconds between two attempts, also where the server asks for more."""
SETTINGS_FAULT = frozenset({401, 403, 404, 405})
"""Status codes that no other prompt would change: the key, the URL or the model is wrong."""


class RequestFailed(NoScore):
    """A request without a usable answer."""

    def __init__(self, reason: str, *, again: bool, wait_s: float = 0.0, is_settings_fault: bool = False) -> None:
        super().__init__(reason)
        self.again = again
        """Whether the same request may succeed later."""
        self.wait_s = wait_s
        """Seconds that the server asks to wait before the next attempt."""
        self.is_settings_fault = is_settings_fault
        """Whether every request will fail in this way."""


class _WholeReplies:
    """Added to a connection: the time limit of a reply holds for its headers together, not for each read of them."""

    sock: Any
    timeout: Any

    def getresponse(self) -> Any:
        """Return the reply, once its headers are there.

        Raises:
            TimeoutError: they are not within the limit.
        """
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            with suppress(OSError):  # it may be closed already
                self.sock.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(self.timeout, end)
        timer.daemon = True
        timer.start()
        try:
            reply = super().getresponse()  # type: ignore[misc]
        except (OSError, http.client.HTTPException) as error:
            if is_late.is_set():
                raise TimeoutError("the headers did not come in time") from error
            raise
        finally:
            timer.cancel()
        # Headers that are cut off look as if they were whole.
        if is_late.is_set():
            reply.close()
            raise TimeoutError("the headers did not come in time")
        return reply


class _Connection(_WholeReplies, urllib3.connection.HTTPConnection):
    pass


class _SecureConnection(_WholeReplies, urllib3.connection.HTTPSConnection):
    pass


class _Pool(urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _SecurePool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


def check_address(url: str) -> None:
    """Check that something listens at the address of a URL.

    Raises:
        ValueError: the URL has no host or port that could exist, the host is not known, or nothing listens there.
    """
    try:
        parts = urllib3.util.parse_url(url)
    except urllib3.exceptions.LocationParseError as error:
        raise ValueError(f"it cannot be read ({error})") from error
    host, port = (parts.host or "").strip("[]"), parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise ValueError(f"nothing answers at {host}:{port} ({error})") from error


@dataclass(frozen=True)
class HTTPClient:
    """Connections to one service. Threads may share it."""

    url: str
    """The address that is asked."""
    api_key: str | None
    timeout_s: float
    """Seconds of one attempt."""
    retries: int
    """Further attempts after the first one."""
    backoff_s: float
    """Seconds before the second attempt; they double with each further one."""
    n_connections: int

    @cached_property
    def _pool(self) -> urllib3.PoolManager:
        pool = urllib3.PoolManager(
            maxsize=self.n_connections, block=True, retries=False, timeout=urllib3.Timeout(total=self.timeout_s)
        )
        pool.pool_classes_by_scheme = {"http": _Pool, "https": _SecurePool}
        return pool

    def ask(self, body: Mapping[str, Any], read: Callable[[bytes], Answer]) -> Answer:
        """Return what `read` makes of the reply to one request.

        Args:
            body: the request.
            read: turns the reply into an answer, or raises RequestFailed, which counts as a failed attempt.

        Raises:
            RequestFailed: no attempt had an answer; the message holds the URL, the attempts and the last reason.
        """
        attempt = 1
        while True:
            try:
                return read(self._ask_once(body))
            except RequestFailed as error:
                if not error.again or attempt > self.retries:
                    times = "1 attempt" if attempt == 1 else f"{attempt} attempts"
                    raise RequestFailed(
                        f"{self.url} gave no usable answer in {times}: {error}",
                        again=False,
                        is_settings_fault=error.is_settings_fault,
                    ) from error
                # Requests that failed together are spread, so that they do not fail together again.
                wait_s = max(error.wait_s, self.backoff_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
                time.sleep(min(wait_s, LONGEST_WAIT_S))
                attempt += 1

    def _ask_once(self, body: Mapping[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        # A text may have halves of surrogate pairs, which UTF-8 cannot hold, and which services refuse in JSON.
        content = json.dumps(body, ensure_ascii=False).encode(errors="replace")
        deadline = time.monotonic() + self.timeout_s
        try:
            reply = self._pool.request(
                "POST", self.url, body=content, headers=headers, redirect=False, preload_content=False
            )
            data = _read(reply, deadline)
        except urllib3.exceptions.TimeoutError as error:
            raise RequestFailed(f"no reply within timeout_s={self.timeout_s:g} s", again=True) from error
        except urllib3.exceptions.HTTPError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}", again=True) from error
        if reply.status != 200:
            raise RequestFailed(
                f"status {reply.status}: {shown(data)}",
                again=reply.status in (408, 429) or reply.status >= 500,
                wait_s=_seconds(reply.headers.get("Retry-After")),
                is_settings_fault=reply.status in SETTINGS_FAULT,
            )
        return data


def _read(reply: urllib3.BaseHTTPResponse, deadline: float) -> bytes:
    """Return the body of a reply.

    The pool's own limit is for one read, and services send white space to keep a connection open.

    Raises:
        urllib3.exceptions.TimeoutError: the body is not whole at `deadline`, a time on `time.monotonic`.
        urllib3.exceptions.HTTPError: the connection broke, or the body is too long.
    """
    data = bytearray()
    try:
        while chunk := reply.read1():
            data += chunk
            if len(data) > LONGEST_REPLY:
                raise urllib3.exceptions.HTTPError(f"the reply has more than {LONGEST_REPLY:,} bytes")
            if time.monotonic() > deadline:
                raise urllib3.exceptions.TimeoutError
    except BaseException:
        reply.close()
        raise
    reply.release_conn()
    return bytes(data)


def _seconds(retry_after: str | None) -> float:
    """Return the seconds of a header `Retry-After`; 0 without one, or if it is a date."""
    return float(retry_after) if retry_after is not None and retry_after.strip().isdecimal() else 0.0


def shown(data: bytes) -> str:
    """Return the beginning of a reply, for messages."""
    return repr(data.decode(errors="replace")[:SHOWN])
