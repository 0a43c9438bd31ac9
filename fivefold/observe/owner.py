"""The process that owns a run's folder, as `status.json` names it, and whether it still runs.

Containers may share the name of their host and a folder, and each count its processes from 1: a process is looked for
only where its number means something.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import psutil

_NAMESPACE = "/proc/self/ns/pid"
"""A link whose target is the same for all processes that see each other's numbers."""


def this_process() -> dict[str, Any]:
    """Return the entries of `status.json` that name this process."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "pid_namespace": _namespace()}


def is_near(status: Mapping[str, Any]) -> bool:
    """Return whether the process of `status` would be seen from here: on the same host, in the same container."""
    # Earlier versions wrote no namespace.
    return status["host"] == socket.gethostname() and status.get("pid_namespace", _namespace()) == _namespace()


def is_this_process(status: Mapping[str, Any]) -> bool:
    """Return whether this process wrote `status`."""
    return is_near(status) and bool(status["pid"] == os.getpid())


def still_runs(status: Mapping[str, Any]) -> bool:
    """Return whether the process that is near and wrote `status` still runs, and not another of the same number.

    One that was killed, and whose parent has not asked how it ended, runs no more.
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
