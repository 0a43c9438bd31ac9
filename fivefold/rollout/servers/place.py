"""Where a server listens: at a Unix socket in a private folder, or on a port (`port.py`)."""

from __future__ import annotations

import os
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fivefold.observe.private_folder import PrivateFolder, short_folder
from fivefold.rollout.servers.client import Address

LONGEST = 107
"""Bytes of a socket's path that Linux takes."""


class Place(Protocol):
    """A place that belongs to one server from before its start until after its end."""

    @property
    def address(self) -> Address:
        """The address for the server and its clients."""

    @property
    def folder(self) -> Path | None:
        """Folder to remove after the server's end."""

    @property
    def descriptor(self) -> int:
        """File descriptor with which a process keeps the place."""

    def let_go(self) -> None:
        """Close this process's descriptor, after it was passed to the server's guard."""

    def problem(self, own: Set[int]) -> str | None:
        """Return which processes besides the server's `own` get its requests, and what to do; None if none does."""


@dataclass(frozen=True)
class SocketPlace:
    """A Unix socket, which no other user of the machine can reach."""

    private: PrivateFolder

    @property
    def address(self) -> Address:
        return self.private.contents / "socket"

    @property
    def folder(self) -> Path:
        return self.private.path

    @property
    def descriptor(self) -> int:
        return self.private.lock

    def let_go(self) -> None:
        os.close(self.private.lock)

    def problem(self, own: Set[int]) -> str | None:
        return None


def private_socket() -> SocketPlace:
    """Return the place of a socket in a new folder that its user alone may enter.

    If the server's guard is killed, the folder stays until the next server starts.

    Raises:
        ValueError: the temporary folder has too long a path for a socket.
    """
    place = SocketPlace(PrivateFolder.create(short_folder()))
    path = os.fsencode(str(place.address))
    if len(path) > LONGEST:
        place.private.remove()
        raise ValueError(
            f"the server's socket would have a path of {len(path)} bytes, and sockets take {LONGEST}: set TMPDIR to a "
            f"folder with a shorter path than {short_folder()}, or make /tmp writable"
        )
    return place
