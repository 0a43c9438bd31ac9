"""Ports of this machine; each belongs to one server. They are the `Place` of servers without Unix sockets.

Some servers bind with SO_REUSEPORT: two of them may listen on one port, and each gets a part of the requests. Others
bind minutes after their start. So it is not enough that a port is free: each replica claims its own.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Set
from dataclasses import dataclass

import psutil

from fivefold.rollout.servers.client import HOST, Address

_REACHED = {HOST, f"::ffff:{HOST}", "0.0.0.0", "::"}
"""Addresses at which a process has to listen in order to get connections to `HOST`."""


@dataclass(frozen=True)
class Port:
    """A port that no other replica of any run on this machine gets while a process has `claim` open."""

    number: int
    claim: socket.socket
    """Socket that is named after the port, and does nothing else. Linux gives a name to one socket at a time, and it
    forgets the name when no process has the socket any more. Like ports, names belong to a network namespace."""

    @property
    def address(self) -> Address:
        return self.number

    @property
    def descriptor(self) -> int:
        return self.claim.fileno()

    @property
    def folder(self) -> None:
        return None

    def let_go(self) -> None:
        self.claim.close()

    def problem(self, own: Set[int]) -> str | None:
        strangers = listeners(self.number) - own
        if not strangers:
            return None
        return (
            f"{' and '.join(map(_describe, strangers))} listens on port {self.number}, which is the server's, and "
            "would get some of its requests or all of them: end that process, or start the run again, whose servers "
            "then have other ports"
        )


def claim_port() -> Port:
    """Claim a port on which no process listens."""
    while True:
        number = _free_port()
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0fivefold-port-{number}")
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return Port(number, claim)


def listeners(number: int) -> set[int | None]:
    """Return the ids of the processes that get connections to a port; None stands for a process of another user."""
    found = _listeners(number)
    # A socket that is opened while the list is made has no process in it yet.
    return _listeners(number) if None in found else found


def _listeners(number: int) -> set[int | None]:
    return {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr
        and connection.laddr.port == number
        and connection.laddr.ip in _REACHED
    }


def _describe(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    try:
        return f"process {pid} ({' '.join(psutil.Process(pid).cmdline())})"
    except psutil.NoSuchProcess:
        return f"process {pid}, which has just ended,"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        number: int = probe.getsockname()[1]
        return number
