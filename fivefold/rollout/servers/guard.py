"""Runs a server, and ends it with all its processes once the process at the other end of standard input is gone.

    python guard.py FOLDER COMMAND...       FOLDER is removed after the server's end; an empty word stands for none

A rollout process may be killed at any time, and a server without its parent would keep its GPUs. The guard is started
by its file name, in a separate session. Processes that the server leaves behind become children of the guard, which
ends them.

When Ray ends a rollout process, it kills the processes that this one has started. So the guard is a child of the
process that is started, which passes its status on and may be killed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import psutil

END_S = 10.0
"""Seconds that the server has to end by itself, with its shared memory and its children."""
PR_SET_CHILD_SUBREAPER = 36
"""Number of this option on Linux; see prctl(2)."""


def main() -> int:
    """Run the server under a guard; return its exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if (guard := os.fork()) > 0:
        os.close(0)
        _, ending = os.waitpid(guard, 0)
        return _exit_status(os.waitstatus_to_exitcode(ending))
    return _guard()


def _guard() -> int:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _, folder, *command = sys.argv
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
    status = server.wait()
    while left := psutil.Process().children(recursive=True):
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=END_S)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    return _exit_status(status)


def _exit_status(status: int) -> int:
    """Return the exit status that tells of `status`, which is negative for a signal."""
    return status if status >= 0 else 128 - status


def _end_with_parent(server: subprocess.Popen[bytes]) -> None:
    # Reading sys.stdin would hold its lock, which would keep the interpreter from ending with the server.
    while os.read(0, 1):
        pass
    server.terminate()
    time.sleep(END_S)
    server.kill()


if __name__ == "__main__":
    sys.exit(main())
