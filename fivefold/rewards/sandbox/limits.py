"""Limits of one process on time, memory and files, and the end of its privileges."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal

FILE_BYTES = 16 << 20
"""Largest file that the process may write."""
OPEN_FILES = 64
MORE_TASKS = 64
"""Processes and threads that may be started where seccomp does not forbid processes."""

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38
CAPABILITY_VERSION = 0x20080522


def limit_resources(timeout_s: float, memory_mb: int, *, counts_tasks: bool) -> None:
    """Limit this process.

    Args:
        timeout_s: seconds of wall-clock time that the process has; its processor time is limited just above.
        memory_mb: address space, in MiB.
        counts_tasks: whether processes and threads are limited. The kernel counts all tasks of the user, so that other
            programs of the same user take part of the limit.
    """
    seconds = math.ceil(timeout_s) + 1
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: memory_mb << 20,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    if counts_tasks:
        limits[resource.RLIMIT_NPROC] = _tasks_of_user() + MORE_TASKS
    for kind, value in limits.items():
        _, most = resource.getrlimit(kind)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (value, value))


def drop_privileges() -> None:
    """Give up the capabilities of a superuser for good, and die with the parent.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    nothing = (ctypes.c_uint32 * 6)()
    for result in (
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        libc.capset(header, nothing),
    ):
        if result != 0:
            raise OSError(ctypes.get_errno(), f"privileges cannot be dropped: {os.strerror(ctypes.get_errno())}")


def _tasks_of_user() -> int:
    """Return the number of threads of all processes of this user."""
    count = 0
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if os.stat(f"/proc/{name}").st_uid == os.getuid():
                    count += len(os.listdir(f"/proc/{name}/task"))
            except OSError:  # it has ended
                continue
    return count
