"""Whether the process that owns a run's folder is still alive.

near    on the same host and in the same container: the process that `status.json` names is looked for by its id
far     the run touches <folder>/heartbeat every few seconds; another machine watches whether the file changes

Containers may share a host name and a folder while each counts its processes from 1, so a process id is used only in
its own namespace. A watcher compares the file's times with each other, so clocks of different machines do not matter.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

BEAT_SECONDS = 5.0
"""Time between two touches."""
WATCH_SECONDS = 60.0
"""Time without a touch after which a run counts as ended."""
POLL_SECONDS = 0.5
_NAMESPACE = "/proc/self/ns/pid"
"""A link with the same target for all processes that can see each other's ids."""


def this_process() -> dict[str, Any]:
    """Return the entries of `status.json` that name this process."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "pid_namespace": _namespace()}


def is_near(status: Mapping[str, Any]) -> bool:
    """Return whether the process of `status` would be visible from here: on the same host, in the same container."""
    # Earlier versions wrote no namespace.
    return status["host"] == socket.gethostname() and status.get("pid_namespace", _namespace()) == _namespace()


def is_this_process(status: Mapping[str, Any]) -> bool:
    """Return whether this process wrote `status`."""
    return is_near(status) and bool(status["pid"] == os.getpid())


def still_runs(status: Mapping[str, Any]) -> bool:
    """Return whether the near process that wrote `status` still runs, rather than another one with the same id.

    A killed process that its parent has not waited for does not run any more.
    """
    try:
        process = psutil.Process(status["pid"])
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        created = process.create_time()
    except psutil.NoSuchProcess:
        return False
    return bool(created < datetime.fromisoformat(status["changed"]).timestamp() + 1.0)


def _namespace() -> str | None:
    try:
        return os.readlink(_NAMESPACE)
    except OSError:  # not Linux
        return None


class Heartbeat:
    """Touches a file again and again, in its own thread, until it is stopped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Create the file and begin.

        Raises:
            OSError: the file cannot be created.
        """
        self.path.touch()
        self._thread.start()

    def stop(self) -> None:
        """End the thread and delete the file."""
        self._stopped.set()
        self._thread.join()
        with suppress(OSError):  # a stale file does no harm
            self.path.unlink()

    def _beat(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            # A file server that does not answer for a moment must not end a run; a later beat succeeds.
            with suppress(OSError):
                os.utime(self.path)


def beats(path: Path) -> bool:
    """Watch the file for up to `WATCH_SECONDS`, and return whether it was touched."""
    before, deadline = _touched(path), time.monotonic() + WATCH_SECONDS
    while time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        if (touched := _touched(path)) is not None and touched != before:
            return True
    return False


def was_touched_lately(path: Path) -> bool:
    """Return whether the file was touched within `WATCH_SECONDS` by the clock of this machine, without waiting."""
    try:
        return time.time() - path.stat().st_mtime < WATCH_SECONDS
    except OSError:
        return False


def _touched(path: Path) -> int | None:
    """Return the time of the last touch in nanoseconds of the file server's clock; None if there is no file."""
    try:
        # Network file systems may answer `stat` from a cache; opening the file asks the server.
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
