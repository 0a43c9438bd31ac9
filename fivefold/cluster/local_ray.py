"""A private Ray on this machine for one run."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
import ray._private.worker
from ray.exceptions import AuthenticationError

from fivefold.cluster.compat import (
    NoDriverFolders,
    asked_often,
    keep_token_private,
    on_loopback,
    signals_kept,
    without_agents,
    without_monitors,
)
from fivefold.cluster.errors import Member, RayEnded
from fivefold.cluster.machine import check_machine, writable_home
from fivefold.observe.errors import RunFailed
from fivefold.observe.private_folder import PrivateFolder, short_folder
from fivefold.observe.timers import PhaseTimers

MAX_OBJECT_STORE = 8 * 2**30
"""Most bytes of the object store. Weights pass through it in pieces, and a step's tokens are some hundred megabytes. A
teacher's most likely tokens, 8 bytes each, may be more: Ray spills what does not fit to its folder."""
MIN_OBJECT_STORE = 256 * 2**20
STORE_SHARE = 0.2
"""Share of the free memory that the object store may grow to."""
START_ATTEMPTS = 2
END_S = 5.0
"""Seconds that processes get to end before they are killed."""
MAX_STARTING = 16
"""Most worker processes that Ray starts at one time and keeps ready; never more than cores."""

PR_SET_CHILD_SUBREAPER = 36
"""Linux's number of the option of prctl(2)."""

SERVERS = ("raylet", "gcs_server")
"""The processes of Ray that every worker needs."""

SYSTEM_CONFIG = {
    # Processes that a worker has started end with it, even if it is killed.
    "kill_child_processes_on_worker_exit_with_raylet_subreaper": True,
    # By default (15), Ray's workers yield to every other process, but the run is the machine's main work.
    "worker_niceness": 0,
    # By default, Ray starts a process for each core in advance, and a run does not use most of them.
    "prestart_worker_first_driver": False,
}


@dataclass(frozen=True)
class Ending:
    """The end of one of Ray's servers while the run needed it."""

    server: str
    """One of `SERVERS`."""
    status: int
    """Exit status; negative: the signal that ended it."""

    def __str__(self) -> str:
        how = f"was killed by {signal.Signals(-self.status).name}" if self.status < 0 else f"exited with {self.status}"
        return f"its process {self.server} {how}"


@dataclass(frozen=True)
class LocalRay:
    """The private Ray of this process."""

    folder: PrivateFolder
    logs: Path
    """Folder of Ray's own logs, inside `folder`."""
    servers: Mapping[str, subprocess.Popen[bytes]]
    """The processes of `SERVERS`."""

    @classmethod
    def start(cls) -> LocalRay:
        """Start Ray and connect to it.

        If this process is killed and cannot call `end`, the workers end with it. Processes that they have started must
        notice that themselves, as inference servers and reward programs do, because Ray is killed, too. The folder
        stays until the next start.

        Raises:
            ValueError: Ray cannot run on this machine as it is set up.
            RunFailed: Ray did not start in `START_ATTEMPTS` attempts.
        """
        check_machine()
        keep_token_private()
        for _ in range(START_ATTEMPTS):
            folder = PrivateFolder.create(short_folder())
            _adopt_orphans(True)
            try:
                _init(folder.contents)
                node = ray._private.worker._global_node
                servers = {name: node.all_processes[name][0].process for name in SERVERS}
                return cls(folder, Path(node.get_logs_dir_path()), servers)
            except BaseException as error:
                _end(folder, ())
                # Ray raises a plain Exception if a start takes too long, as on a busy machine. It has once raised an
                # AuthenticationError when another Ray started in the same second; the cause is unknown.
                if type(error) is not Exception and not isinstance(error, AuthenticationError):
                    raise
                reason = error
        raise RunFailed(f"Ray did not start on this machine in {START_ATTEMPTS} attempts: {reason}") from reason

    def ended(self) -> Ending | None:
        """Return which of Ray's servers has ended, and how; None if all are running."""
        statuses = ((name, process.poll()) for name, process in self.servers.items())
        return next((Ending(name, status) for name, status in statuses if status is not None), None)

    def failure(self, timers: PhaseTimers, kept_logs: Path, failed: Collection[Member]) -> RayEnded | None:
        """Return the end of a server, for which all workers fail, whichever `failed`; None if all are running.

        Ray's own logs are then copied to `kept_logs`, because `end` removes them.
        """
        ending = self.ended()
        if ending is None:
            return None
        shutil.copytree(self.logs, kept_logs, dirs_exist_ok=True, ignore_dangling_symlinks=True)
        return RayEnded(ending, timers.current, kept_logs)

    def processes(self) -> Iterator[psutil.Process]:
        """Yield all processes of this Ray that descend from this process."""
        yield from _processes(self.folder)

    def end(self, seen: Collection[psutil.Process] = ()) -> None:
        """End Ray, with all its processes and files.

        Args:
            seen: its processes as listed by `processes` before any was killed. Later lists may be incomplete, because
                a process is found through its parent.
        """
        _end(self.folder, seen)


def _init(folder: Path) -> None:
    store = _object_store_bytes()
    # A container's /dev/shm may be as small as 64 MB. Then the slower temporary folder holds the object store.
    roomy = Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 1.1 * store
    with (
        signals_kept(), on_loopback(), without_monitors(), without_agents(), asked_often(),
        writable_home(folder / "home"),
    ):  # fmt: skip
        ray.init(
            address="local",
            num_cpus=min(os.cpu_count() or 1, MAX_STARTING),
            object_store_memory=store,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            job_config=NoDriverFolders(),
            _temp_dir=str(folder),
            _plasma_directory=None if roomy else str(folder),
            _system_config=SYSTEM_CONFIG,
        )


def _end(folder: PrivateFolder, seen: Collection[psutil.Process]) -> None:
    doomed = {*seen, *_processes(folder)}
    ray.shutdown()
    # Processes whose parent has ended are children of this process by now, and only found here.
    doomed.update(_processes(folder))
    _, alive = psutil.wait_procs(doomed, timeout=END_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=END_S)
    _adopt_orphans(False)
    folder.remove()


def _processes(folder: PrivateFolder) -> Iterator[psutil.Process]:
    for child in psutil.Process().children():
        try:
            command = " ".join(child.cmdline())
            if command.startswith("ray::") or str(folder.path) in command:
                yield child
                yield from child.children(recursive=True)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue


def _adopt_orphans(adopt: bool) -> None:
    """Set whether descendants become children of this process, instead of init, when their parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def _object_store_bytes() -> int:
    free = psutil.virtual_memory().available
    return int(min(MAX_OBJECT_STORE, max(MIN_OBJECT_STORE, STORE_SHARE * free)))
