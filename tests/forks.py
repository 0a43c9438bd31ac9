"""Processes that begin with everything imported: one server has imported it, and forks them.

pytest ──starts──> server, which imports while pytest's workers collect tests
       ──starts──> worker ... ──asks the server for──> processes of its tests
"""

from __future__ import annotations

import atexit
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.forked_workers import HOST, fork_workers, python_path

ADDRESS = "FORK_SERVER"
"""Variable with the address of the server that pytest's workers share."""


def share_server() -> None:
    """Start the server here, for the workers that this process is about to start."""
    forking()
    multiprocessing.forkserver.ensure_running()
    os.environ[ADDRESS] = multiprocessing.forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]


def use_shared_server() -> None:
    """Fork from the server of the process that has started this one."""
    _, held = os.pipe()  # a server of this process would end with it
    server = multiprocessing.forkserver._forkserver
    vars(server).update(
        _forkserver_address=os.environ[ADDRESS],
        _forkserver_alive_fd=held,
        ensure_running=multiprocessing.resource_tracker.ensure_running,
    )


def forking() -> ForkServerContext:
    """Return the context whose processes are forked from the server, which starts with the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


def start_forked(
    arguments: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    output: Path,
    errors: Path,
    is_leader: bool = False,
) -> BaseProcess:
    """Start the `fivefold` command, or a Python program if `arguments` begin with its file, in a forked process.

    Args:
        arguments: as on the command line.
        cwd: its working folder.
        environment: its environment.
        output: file for its standard output.
        errors: file for its standard error output.
        is_leader: whether it leads a process group, as a shell starts it.
    """
    process = forking().Process(target=_run, args=(list(arguments), cwd, dict(environment), output, errors, is_leader))
    process.start()
    return process


def run_forked(
    arguments: Sequence[str], *, cwd: Path, environment: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run what `start_forked` starts as `subprocess.run` does.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds, and was killed.
    """
    with tempfile.TemporaryDirectory(prefix="forked-") as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        process = start_forked(arguments, cwd=cwd, environment=environment, output=output, errors=errors)
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(arguments), timeout, output.read_bytes(), errors.read_bytes())
        return subprocess.CompletedProcess(list(arguments), process.exitcode, output.read_text(), errors.read_text())


@contextmanager
def forked_workers() -> Iterator[None]:
    """Let the workers of each Ray that this process starts in the block be forked, too."""
    from ray._private import ray_constants

    receiver, sender = forking().Pipe(duplex=False)
    process = forking().Process(target=_say_host, args=(sender,))
    process.start()
    host = receiver.recv()
    process.join()
    script = ray_constants.SETUP_WORKER_FILENAME
    fork_workers(host)
    try:
        yield
    finally:
        ray_constants.SETUP_WORKER_FILENAME = script
        del os.environ[HOST]


def _say_host(sender: Connection) -> None:
    from tests import preloaded

    sender.send(preloaded.HOST)


def _run(
    arguments: list[str], cwd: Path, environment: dict[str, str], output: Path, errors: Path, is_leader: bool
) -> None:
    from tests import preloaded

    if is_leader:
        os.setsid()
    for descriptor, file in ((1, output), (2, errors)):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:] = python_path(cwd)
    is_program = arguments[0].endswith(".py")
    sys.argv = arguments if is_program else ["fivefold", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored under nohup
    fork_workers(preloaded.HOST)
    from fivefold.cli.main import app

    try:
        if is_program:
            runpy.run_path(arguments[0], run_name="__main__")
        else:
            app(prog_name="fivefold")
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
