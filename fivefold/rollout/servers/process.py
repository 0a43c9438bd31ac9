"""Starts an inference server, waits until it is ready, and ends it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import psutil

from fivefold.rollout.servers.client import HttpClient
from fivefold.rollout.servers.place import Place

GUARD = Path(__file__).with_name("guard.py")
LAST_LINES, LAST_BYTES, WIDEST = 5, 8192, 300
"""Lines that `last_said` returns at most, out of so many bytes at the end, and characters of each of them."""
POLL_S = 0.25
"""Seconds between two questions whether the server is ready."""
WORKERS_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that tell torch.distributed which rank this process is; they would mislead the server."""


class ServerDied(RuntimeError):
    """The server's process has ended."""


def last_said() -> str:
    """Return the last lines of this process's log, to which its server writes too; nothing if that is no file."""
    about = os.fstat(1)
    if not stat.S_ISREG(about.st_mode):
        return ""
    with open("/proc/self/fd/1", "rb") as log:
        log.seek(max(0, about.st_size - LAST_BYTES))
        lines = log.read().decode(errors="replace").splitlines()
    return "\n".join([line[:WIDEST] for line in lines if line.strip()][-LAST_LINES:])


class Part(Protocol):
    """The part of a server on another node (`follower.Follower`)."""

    def wait_for_end(self) -> str:
        """Return why the part has ended, once it has."""

    def end(self) -> None:
        """Ask the part to end, if it has not."""

    def wait_until_gone(self) -> None:
        """Return once the part's processes are gone."""


class ServerProcess:
    """A server under its guard. Its messages go to this process's log."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        places: Sequence[Place],
        others: Sequence[Part] = (),
    ) -> None:
        """Start `command` with the variables of this process and of `environment`.

        Args:
            command: program and arguments.
            environment: variables that this process lacks or has with other values.
            places: where the server will listen; they stay the server's until that has ended.
            others: the server's parts on other nodes, which have been started. If one ends, all do.
        """
        inherited = {name: value for name, value in os.environ.items() if name not in WORKERS_OWN}
        self._places = places
        folder = next((place.folder for place in places if place.folder is not None), "")
        self._process = subprocess.Popen(
            # -P keeps the guard's folder off sys.path.
            [sys.executable, "-P", str(GUARD), str(folder), *command],
            stdin=subprocess.PIPE,
            env={**inherited, **environment},
            # In a separate session, Ctrl-C does not reach it: the run ends it.
            start_new_session=True,
            pass_fds=[place.descriptor for place in places],
        )
        # The guard alone keeps the places, because it outlives both the server and this process.
        for place in places:
            place.let_go()
        self._others = others
        self._cause: str | None = None
        """Why this process has ended it, or why a part on another node ended while this one ran."""
        self._watches = [threading.Thread(target=self._end_with, args=(other,), daemon=True) for other in others]
        for watch in self._watches:
            watch.start()

    def wait_until_ready(self, http: HttpClient) -> None:
        """Return once the server is ready.

        Raises:
            ServerDied: the server ended before that.
            RuntimeError: another process gets its requests.
        """
        while not http.is_healthy():
            self.check()
            time.sleep(POLL_S)
        own = {child.pid for child in psutil.Process(self._process.pid).children(recursive=True)}
        for place in self._places:
            if problem := place.problem(own):
                self.close()
                raise RuntimeError(problem)

    def check(self, wait_s: float = 0.0) -> None:
        """Raise ServerDied if the server has ended, or ends within `wait_s` seconds."""
        try:
            status = self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return
        own = f"the server ended with status {status}; its own messages stand above in this process's log"
        raise ServerDied(self._cause or own)

    def close(self, cause: str | None = None) -> None:
        """End the server on all its nodes, for a cause that `check` then tells, and wait until it is gone."""
        self._cause = self._cause or cause
        self._end()
        self._process.wait()
        for other in self._others:
            other.end()
        for watch in self._watches:
            watch.join()

    def _end(self) -> None:
        """Tell the guard to end the processes of this node."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _end_with(self, other: Part) -> None:
        """End this part of the server, whose processes would wait for the processes of `other`, once that has ended."""
        cause = other.wait_for_end()
        if self._process.poll() is None:
            self._cause = cause
        self._end()
        other.wait_until_gone()
