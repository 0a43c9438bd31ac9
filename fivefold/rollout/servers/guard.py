"""Runs a server and ends it, and all it has started, once whoever holds this process's standard input has gone.

    python guard.py COMMAND...

A rollout process may be killed at any time, and a server whose parent is gone would keep its GPUs. Started by its file
name in a session of its own: the process group is this process, the server and the server's children.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import psutil

END_S = 10.0
"""How long the server has to end in order, with its shared memory and its own children."""


def main() -> int:
    """Returns the server's exit status."""
    # The group is told to end below, this process with it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=_default_signals)
    threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
    status = server.wait()
    _kill(psutil.Process().children(recursive=True))
    return status if status >= 0 else 128 - status


def _default_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end_with_parent(server: subprocess.Popen[bytes]) -> None:
    # Not sys.stdin: its lock, held here, would keep the interpreter from ending with the server.
    while os.read(0, 1):
        pass
    descendants = psutil.Process().children(recursive=True)
    server.terminate()
    try:
        server.wait(END_S)
    except subprocess.TimeoutExpired:
        server.kill()
    _kill(descendants)
    os.killpg(0, signal.SIGKILL)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    sys.exit(main())
