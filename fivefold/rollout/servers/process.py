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
from fivefold.rollout.servers.port import Port, listeners

GUARD = Path(__file__).with_name("guard.py")
POLL_S = 0.25
"""Seconds between two questions whether the server is ready."""
WORKERS_OWN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that tell torch.distributed which rank this process is; they would mislead the server."""


class ServerProcess:
    """A server under its guard. Its messages go to the same log as those of this process."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], port: Port) -> None:
        """Start `command` with the variables of this process and those of `environment`.

        Args:
            command: program and arguments.
            environment: variables that this process lacks or has with other values.
            port: the port on which the server will listen; it stays claimed until the server has ended.
        """
        inherited = {name: value for name, value in os.environ.items() if name not in WORKERS_OWN}
        self._port = port.number
        with port.claim:
            self._process = subprocess.Popen(
                # -P keeps the guard's folder off sys.path.
                [sys.executable, "-P", str(GUARD), *command],
                stdin=subprocess.PIPE,
                env={**inherited, **environment},
                # In a session of its own, Ctrl-C does not reach it: the run ends it.
                start_new_session=True,
                # The guard alone keeps the claim, because it outlives both the server and this process.
                pass_fds=[port.claim.fileno()],
            )

    def wait_until_ready(self, http: HttpClient) -> None:
        """Return once the server is ready.

        Raises:
            RuntimeError: the server ended before that, or another process listens on its port.
        """
        while not http.is_healthy():
            self.check()
            time.sleep(POLL_S)
        self._require_own_port()

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

    def _require_own_port(self) -> None:
        listening = listeners(self._port)
        own = {child.pid for child in psutil.Process(self._process.pid).children(recursive=True)}
        if strangers := listening - own:
            self.close()
            raise RuntimeError(
                f"{' and '.join(map(_describe, strangers))} listens on port {self._port}, which is the server's, and "
                "would get some of its requests or all of them: end that process, or start the run again, whose "
                "servers then have other ports"
            )


def _describe(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    try:
        return f"process {pid} ({' '.join(psutil.Process(pid).cmdline())})"
    except psutil.NoSuchProcess:
        return f"process {pid}, which has just ended,"
