"""Ray's workers in tests: forked from a process that has imported all libraries but Ray, which then they import.

    server of tests.forks ──forks──> host, before it imports Ray
    raylet ──starts──> this file, as the script that starts a worker: asks the host, and ends
    host   ──forks───> worker, in the environment, folder and output that the script was given

Ray reads its environment when it is imported, so that each worker imports it by itself. A worker is a child of the
host, not of the raylet. What Ray does with its children is seen in `tests/unit/cluster/test_worker_calls.py`, whose
workers are not forked, and how a worker starts from nothing by the runs that tests start as `fivefold` commands of
their own.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOST = "FORKED_WORKERS"
"""Variable with the name of the host's socket."""
STANDARD = (0, 1, 2)
"""Descriptors of standard input, output and error output."""


def fork_host() -> str:
    """Fork the host, which ends after this process and all that it forks. Returns the name of its socket."""
    name = f"fivefold-tests-{secrets.token_hex(8)}"
    alive, held = os.pipe()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{name}")
        listening.listen(64)
        if os.fork() == 0:
            os.close(held)
            _serve(listening, alive)
            os._exit(0)
    os.close(alive)  # `held` stays open until this process ends
    return name


def fork_workers(host: str) -> None:
    """Let the host fork the workers of each Ray that this process starts."""
    import ray._private.ray_constants

    os.environ[HOST] = host
    # Ray puts the folder of its own script before this, with `os.path.join`, which leaves an absolute path as it is.
    ray._private.ray_constants.SETUP_WORKER_FILENAME = str(Path(__file__))


def python_path(first: Path) -> list[str]:
    """Return what Python searches if it is started by a user in a project, `first` first: no folders of pytest's."""
    added = (str(ROOT), *(path for path in sys.path if path.startswith(str(ROOT / "tests"))))
    return [str(first), str(ROOT), *(path for path in sys.path if path not in added)]


def _serve(listening: socket.socket, server: int) -> None:
    import select
    import signal

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    while True:
        ready, _, _ = select.select([listening, server], [], [])
        if server in ready:
            return
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            os.close(server)
            _worker(connection)
        connection.close()


def _worker(connection: socket.socket) -> None:
    """Become the worker that is asked for, and exit as it does."""
    import signal

    with connection:
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, len(STANDARD))
        for standard, descriptor in zip(STANDARD, descriptors, strict=True):
            os.dup2(descriptor, standard)
            os.close(descriptor)
    request = json.loads(message)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Ray replaces both, and goes on with their descriptors.
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    status = 1
    try:
        _run(request["command"])
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    finally:
        if (error_info := sys.exc_info())[0] is not None:
            sys.excepthook(*error_info)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(command: list[str]) -> None:
    """Run Ray's script as `python` does."""
    import runpy

    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.argv = command
    sys.path[:] = python_path(Path(command[0]).parent)
    runpy.run_path(command[0], run_name="__main__")


def _ask() -> None:
    command = [argument for argument in sys.argv[1:] if not argument.startswith("--language=")]
    request = {"command": command, "environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{os.environ[HOST]}")
        socket.send_fds(connection, [json.dumps(request).encode()], STANDARD)
        connection.recv(1)  # until the worker has read all of it


if __name__ == "__main__":
    _ask()
