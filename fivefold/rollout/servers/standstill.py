"""How a server stands still while its weights are replaced.

abort   its requests answer with what they have, and are asked again from there: their tokens are read anew
keep    they stay in the server with their keys and values, and go on (`rollout.recompute_kv_cache: false`)
"""

from __future__ import annotations

from fivefold.rollout.servers.client import HttpClient
from fivefold.rollout.servers.dialect import Dialect
from fivefold.rollout.servers.stream import ServerStream

PAUSE_S = 60.0
"""Seconds that a server has to abort or hold its requests, or to sample one token; else it is ended, as if it had
died."""


class Standstill:
    """Makes one server stand still between two tokens of its stream, and lets it go on."""

    def __init__(self, dialect: Dialect, *, keeps_cache: bool) -> None:
        """Begin with a server that answers."""
        self._dialect = dialect
        self._keeps_cache = keeps_cache
        self.is_on = False

    def begin(self, http: HttpClient, stream: ServerStream) -> None:
        """Make the server stand still; the answers of requests that it aborts for that are in the stream afterwards.

        Raises:
            ServerHangs: it did not within `PAUSE_S`.
        """
        if self._keeps_cache:
            self._dialect.hold(http, PAUSE_S)
        else:
            stream.hold()
            self._dialect.pause(http, PAUSE_S)
            stream.interrupted()
        self.is_on = True

    def end(self, http: HttpClient, stream: ServerStream, version: int) -> None:
        """Let the server go on, with weights of `version`.

        A server that keeps caches is told its version even if it did not stand still, because nothing was running.
        """
        stream.resumed(version)
        if self._keeps_cache:
            self._dialect.go_on(http, version)
        else:
            self._dialect.resume(http)
        self.is_on = False
