"""Runs a server and ends it, with all it has started, once whoever holds this process's standard input has gone.

    python guard.py COMMAND...

A rollout process may be killed at any time, and a server whose parent is gone would keep its GPUs. Started by its file
name in a session of its own. Whatever the server leaves behind becomes this process's child, and ends with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import psutil

END_S = 10.0
"""How long the server has to end in order, with its shared memory and its own children."""
PR_SET_CHILD_SUBREAPER = 36
"""Linux's number for it, see prctl(2)."""


def main() -> int:
    """Returns the server's exit status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
    status = server.wait()
    while left := psutil.Process().children(recursive=True):
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=END_S)
    return status if status >= 0 else 128 - status


def _end_with_parent(server: subprocess.Popen[bytes]) -> None:
    # Not sys.stdin: its lock, held here, would keep the interpreter from ending with the server.
    while os.read(0, 1):
        pass
    server.terminate()
    time.sleep(END_S)
    server.kill()


if __name__ == "__main__":
    sys.exit(main())
