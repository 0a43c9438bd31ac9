"""A private Ray on this machine for one run, and what keeps Ray's own talk off the screen."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray
import ray._private.services
import ray._private.worker

from fivefold.cluster.interrupt import keep_exit_statuses
from fivefold.observe.errors import RunFailed

MAX_OBJECT_STORE = 8 * 2**30
"""Weights and batches pass through the object store in pieces; more than this never lies in it at one time."""
MIN_OBJECT_STORE = 256 * 2**20
STORE_SHARE = 0.2
"""Share of the free memory that the object store may grow to."""
START_ATTEMPTS = 3
END_S = 5.0
"""How long processes get to go after they were told to."""
JOIN_S = 10.0
"""How long a cluster has to accept a connection."""
MAX_STARTING = 16
"""Worker processes that Ray starts at one time, and keeps ready; also bounded by the cores."""

PR_SET_CHILD_SUBREAPER = 36
"""Linux's number for it, see prctl(2)."""

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
"""Ray reads these from the environment alone: no usage reports, no second account of an error that the driver raises
itself, no hands on CUDA_VISIBLE_DEVICES, no copy of the working folder under `uv run`."""

SYSTEM_CONFIG = {
    # Whatever a worker has started ends with it, also when it is killed.
    "kill_child_processes_on_worker_exit_with_raylet_subreaper": True,
    # Ray gives way to everything else on the machine by default (15); the run is what the machine is here for.
    "worker_niceness": 0,
}


def start() -> Path:
    """Starts Ray and connects to it; returns its temporary folder.

    If this process is killed and cannot call `end`, the workers die with it; two small helpers of Ray's need a minute.

    Raises:
        RunFailed: Ray did not come up.
    """
    for _ in range(START_ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix="fivefold-", dir=_short_folder()))
        _adopt_orphans(True)
        try:
            _init(folder)
            return folder
        except BaseException as error:
            end(folder)
            # Ray's word for a start that took more than its 30 seconds, as on a busy machine, is Exception itself.
            if type(error) is not Exception:
                raise
            slow = error
    raise RunFailed(f"Ray did not start on this machine in {START_ATTEMPTS} attempts: {slow}") from slow


def _init(folder: Path) -> None:
    store = _object_store_bytes()
    # A container's /dev/shm may be as small as 64 MB; files in the temporary folder are as good, if slower.
    roomy = Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 1.1 * store
    with _signals_kept():
        ray.init(
            address="local",
            num_cpus=min(os.cpu_count() or 1, MAX_STARTING),
            object_store_memory=store,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            _temp_dir=str(folder),
            _plasma_directory=None if roomy else str(folder),
            _system_config=SYSTEM_CONFIG,
        )


def end(folder: Path, seen: Collection[psutil.Process] = ()) -> None:
    """Ends the Ray that `start` started in `folder`: no process of it and no file is left.

    `seen`: its processes as `processes` listed them before their parents were killed. While that happens no listing is
    whole: a process is found through its parent.
    """
    doomed = {*seen, *processes(folder)}
    ray.shutdown()
    # By now those whose parent ended before them are our own children.
    doomed.update(processes(folder))
    _, alive = psutil.wait_procs(doomed, timeout=END_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=END_S)
    _adopt_orphans(False)
    shutil.rmtree(folder, ignore_errors=True)


def processes(folder: Path) -> Iterator[psutil.Process]:
    """All processes of the Ray in `folder`, as far as they are below this one."""
    for child in psutil.Process().children():
        try:
            command = " ".join(child.cmdline())
            if command.startswith("ray::") or str(folder) in command:
                yield child
                yield from child.children(recursive=True)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue


def _adopt_orphans(adopt: bool) -> None:
    """Whether processes below this one whose parent has ended become its children, not those of the system's first."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def join(address: str) -> None:
    """Connects to a Ray cluster that runs already.

    Raises:
        ValueError: there is none at `address`, or it wants a token that we do not have.
    """
    try:
        _require_listening(address)
        with _signals_kept():
            ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
    except ConnectionError as error:
        raise ValueError(_why_not_joined(address, error)) from error


def _require_listening(address: str) -> None:
    """Symptom: ray.init waits for minutes, in silence, for a cluster that was killed, whose address Ray still keeps.

    Cause: it takes the address of the last `ray start`, and tries again and again where nobody answers.
    Remove when: it gives up where the connection is refused.

    Raises:
        ConnectionError: nobody listens there.
    """
    found = ray._private.services.canonicalize_bootstrap_address(address)
    if found is None or "://" in found:
        return
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=JOIN_S).close()
    except OSError as error:
        raise ConnectionError(str(error)) from error


def _why_not_joined(address: str, error: ConnectionError) -> str:
    if "AuthenticationError" in str(error.__cause__):
        return (
            f"the Ray cluster at scheduler.address={address!r} asks for a token: set RAY_AUTH_MODE=token, and have the "
            "cluster's token in ~/.ray/auth_token or RAY_AUTH_TOKEN"
        )
    return (
        f"scheduler.type is ray, but no Ray cluster answers at scheduler.address={address!r}: start one with "
        "`ray start --head` on its first machine, or set scheduler.type=local"
    )


def hush() -> None:
    """To be called before Ray starts or is joined."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _silence_error_channel()


def _silence_error_channel() -> None:
    """Symptom: "(raylet) A worker died or was killed ..." on the screen when a worker dies, beside our own message.

    Cause: Ray's driver prints what its cluster publishes on the error channel, whatever `log_to_driver` says.
    Remove when: `log_to_driver=False` covers that channel.
    """
    ray._private.worker._worker_logs_enabled = False


@contextmanager
def _signals_kept() -> Iterator[None]:
    """`ray.init` handles SIGTERM in its own way and ignores SIGCHLD; signals belong to the program that calls us."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        keep_exit_statuses()


def _short_folder() -> str:
    """Where sockets may lie: their paths are limited to about 100 characters, which a user's TMPDIR may exceed."""
    return "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()


def _object_store_bytes() -> int:
    free = psutil.virtual_memory().available
    return int(min(MAX_OBJECT_STORE, max(MIN_OBJECT_STORE, STORE_SHARE * free)))
