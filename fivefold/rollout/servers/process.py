"""Starts an inference server, waits until it is ready, and ends it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fivefold.rollout.servers.client import HOST, HttpClient

GUARD = Path(__file__).with_name("guard.py")
POLL_S = 0.25
"""Seconds between two questions whether the server is ready."""
WORKERS_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that tell torch.distributed which rank this process is; they would mislead the server."""


class ServerProcess:
    """A server under its guard. Its messages go to the same log as those of this process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `command` with the variables of this process and those of `environment`."""
        inherited = {name: value for name, value in os.environ.items() if name not in WORKERS_OWN}
        self._process = subprocess.Popen(
            # -P keeps the guard's folder off sys.path.
            [sys.executable, "-P", str(GUARD), *command],
            stdin=subprocess.PIPE,
            env={**inherited, **environment},
            # In a session of its own, Ctrl-C does not reach it: the run ends it.
            start_new_session=True,
        )

    def wait_until_ready(self, http: HttpClient) -> None:
        """Return once the server is ready.

        Raises:
            RuntimeError: the server ended before that.
        """
        while not http.is_healthy():
            self.check()
            time.sleep(POLL_S)

    def check(self, wait_s: float = 0.0) -> None:
        """Raise RuntimeError if the server has ended, or ends within `wait_s` seconds."""
        try:
            status = self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return
        raise RuntimeError(f"the server ended with status {status}; its own messages stand above in this process's log")

    def close(self) -> None:
        """End the server and wait until it is gone."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def free_port() -> int:
    """Return a port of this machine on which no process listens."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        port: int = listener.getsockname()[1]
        return port
