"""Workers of Ray that begin with large libraries imported: they are forked where Ray starts a Python for each.

    raylet ── starts ──> START ── arguments, variables, files ──> server ── forks ──> Ray's default_worker.py

The server is forked from the driver before that imports Ray, because Ray reads variables of a worker when it is
imported. The workers become children of the driver, as all orphans of a run do (`fivefold.cluster.local_ray`), and so
end with the run.
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import os
import runpy
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

START = """
import json, os, socket, sys
from pathlib import Path

message = json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect(str(Path(__file__).with_name("server")))
    socket.send_fds(server, [len(message).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(message)
    server.recv(1)  # The worker has the other end for as long as it lives.
"""
"""The program that Ray starts in place of its setup_worker.py."""

FORK = multiprocessing.get_context("fork")


@contextmanager
def forked_workers() -> Iterator[None]:
    """Inside the block, the workers of a Ray that this process starts have imported what this process has.

    Raises:
        RuntimeError: this process has imported Ray.
    """
    if "ray" in sys.modules:
        raise RuntimeError("workers cannot be forked from a process that has imported Ray")
    folder = Path(tempfile.mkdtemp(prefix="workers-", dir="/tmp"))
    start = folder / "start.py"
    start.write_text(START)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "server"))
        listener.listen()
        server = FORK.Process(target=_serve, args=(listener,))
        server.start()
    try:
        with _workers_started_by(start):
            yield
    finally:
        server.kill()
        server.join()
        shutil.rmtree(folder)


@contextmanager
def _workers_started_by(program: Path) -> Iterator[None]:
    """Inside the block, a Ray that this process starts takes `program` for its setup_worker.py."""
    import ray._private.services as services

    begin, signature = services.start_raylet, inspect.signature(services.start_raylet)

    def start_raylet(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        call.arguments["setup_worker_path"] = str(program)
        return begin(*call.args, **call.kwargs)

    with mock.patch.object(services, "start_raylet", start_raylet):
        yield


def _serve(listener: socket.socket) -> None:
    """Fork a worker for each request, until the driver ends."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    while driver.sentinel not in wait([listener, driver.sentinel]):
        connection, _ = listener.accept()
        parent = FORK.Process(target=_fork_worker, args=(listener, connection))
        parent.start()
        connection.close()
        parent.join()


def _fork_worker(listener: socket.socket, connection: socket.socket) -> None:
    """Fork a worker, and leave it as an orphan."""
    listener.close()
    FORK.Process(target=_become_worker, args=(connection,)).start()
    os._exit(0)


def _become_worker(connection: socket.socket) -> None:
    """Run what the request in `connection` asks for, as Ray's setup_worker.py does."""
    header, files, *_ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as request:
        words, environment, folder = json.loads(request.read(int.from_bytes(header, "big")))
    for descriptor, file in enumerate(files):
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)

    from ray._private.runtime_env.context import RuntimeEnvContext, update_envs
    from ray._private.workers import setup_worker

    options, (program, *arguments) = setup_worker.parser.parse_known_args(words)
    update_envs(RuntimeEnvContext.deserialize(options.serialized_runtime_env_context or "{}").env_vars)
    sys.path[0] = str(Path(program).parent)
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
