"""Starts an inference server, waits until it is ready, and ends it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from fivefold.rollout.servers.client import HttpClient
from fivefold.rollout.servers.place import Place

GUARD = Path(__file__).with_name("guard.py")
POLL_S = 0.25
"""Seconds between two questions whether the server is ready."""
WORKERS_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that tell torch.distributed which rank this process is; they would mislead the server."""


class ServerDied(RuntimeError):
    """The server's process has ended."""


class ServerProcess:
    """A server under its guard. Its messages go to the same log as those of this process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], place: Place) -> None:
        """Start `command` with the variables of this process and those of `environment`.

        Args:
            command: program and arguments.
            environment: variables that this process lacks or has with other values.
            place: where the server will listen; it stays the server's until that has ended.
        """
        inherited = {name: value for name, value in os.environ.items() if name not in WORKERS_OWN}
        self._place = place
        self._process = subprocess.Popen(
            # -P keeps the guard's folder off sys.path.
            [sys.executable, "-P", str(GUARD), str(place.folder or ""), *command],
            stdin=subprocess.PIPE,
            env={**inherited, **environment},
            # In a session of its own, Ctrl-C does not reach it: the run ends it.
            start_new_session=True,
            pass_fds=[place.descriptor],
        )
        # The guard alone keeps the place, because it outlives both the server and this process.
        place.let_go()

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
        if problem := self._place.problem(own):
            self.close()
            raise RuntimeError(problem)

    def check(self, wait_s: float = 0.0) -> None:
        """Raise ServerDied if the server has ended, or ends within `wait_s` seconds."""
        try:
            status = self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return
        raise ServerDied(f"the server ended with status {status}; its own messages stand above in this process's log")

    def close(self) -> None:
        """End the server and wait until it is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
