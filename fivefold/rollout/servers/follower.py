"""A server's processes on the nodes after its first one, which start and end together with the first node's.

    node 0   ServerLife ──starts──> the server, which has the HTTP API
               │ Follower: a connection to each further node
    node 1   FollowerHost  ──starts──> the server's part there, when it is sent the replica's spec

The connection lives as long as both parts do. A part that dies says so there and closes it, and node 0 ends the rest; a
node 0 that ends the server, or is gone, closes it too. Then the host waits for the next start.
"""

from __future__ import annotations

import secrets
import threading
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener

from fivefold.rollout.replica import FollowerAddress, ReplicaSpec
from fivefold.rollout.servers.command import server_command
from fivefold.rollout.servers.dialect import Dialect
from fivefold.rollout.servers.process import POLL_S, ServerDied, ServerProcess

KEY_BYTES = 32


class Follower:
    """The server's part on one further node, as node 0 sees it."""

    def __init__(self, address: FollowerAddress, spec: ReplicaSpec) -> None:
        """Start the part; `spec.node` is the node's."""
        self._host = address.host
        self._connection = _connect(address)
        self._connection.send(spec)

    def wait_for_end(self) -> str:
        """Return why the part has ended, once it has."""
        try:
            return f"the server's part on node {self._host} says: {self._connection.recv()}"
        except (EOFError, OSError):
            return f"the connection to its processes on node {self._host} broke"

    def end(self) -> None:
        """Ask the part to end, if it has not."""
        with suppress(OSError):
            self._connection.send(None)

    def wait_until_gone(self) -> None:
        """Return once the part's processes are gone."""
        with self._connection, suppress(EOFError, OSError):
            while True:
                self._connection.recv()


class FollowerHost:
    """Starts the part of a server on this node as often as node 0 asks for it."""

    def __init__(self, dialect: Dialect, spec: ReplicaSpec, host: str) -> None:
        """Listen for node 0 at `host`, this node's address for the others."""
        self._dialect = dialect
        key = secrets.token_bytes(KEY_BYTES)
        # Whoever has the key can run commands here.
        self._listener = Listener((host, 0), authkey=key)
        _, port = self._listener.address
        self._address = FollowerAddress(host, port, key, tuple(dialect.devices(spec)))
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def address(self) -> FollowerAddress:
        """Return where node 0 reaches this object."""
        return self._address

    def close(self) -> None:
        """Listen no longer, once the part that runs has ended."""
        self._is_closed = True
        with suppress(EOFError, OSError):  # it has seen that by itself
            _connect(self._address).close()
        self._thread.join()

    def _serve(self) -> None:
        with self._listener:
            while not self._is_closed:
                try:
                    connection = self._listener.accept()
                except (AuthenticationError, EOFError, OSError):  # a stranger
                    continue
                with connection:
                    self._run(connection)

    def _run(self, head: Connection) -> None:
        """Run the part until it ends, or node 0 asks for its end or is gone; its processes are gone on return."""
        try:
            spec = head.recv()
            place = self._dialect.place()
            command = server_command(self._dialect, spec, place.address)
            part = ServerProcess(command, self._dialect.environment(spec), [place])
        except (EOFError, OSError, ValueError) as error:
            _tell(head, error)
            return
        try:
            while not head.poll(POLL_S):
                part.check()
        except ServerDied as death:
            _tell(head, death)
        finally:
            part.close()


def _connect(address: FollowerAddress) -> Connection:
    return Client((address.host, address.port), authkey=address.key)


def _tell(head: Connection, error: Exception) -> None:
    with suppress(OSError):
        head.send(str(error))
