"""What a private Ray needs of this machine. Without it, Ray hangs, or fails with a misleading message."""

from __future__ import annotations

import os
import resource
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray._private.accelerators import get_accelerator_manager_for_resource

from fivefold.cluster.role import LOOPBACK
from fivefold.config.schema.machines import ClusterConfig, SchedulerConfig

MIN_OPEN_FILES = 1024
"""Open files that a process must be allowed to have. Ray's servers need about 60, and 4 for each worker; workers that
use NCCL or inference servers need several hundred."""

CONNECT_S = 5.0
"""Seconds within which a connection to this machine itself must be accepted."""


def check_machine() -> None:
    """Refuse a machine on which Ray cannot run.

    Raises:
        ValueError: too few open files are allowed, or the loopback interface is down.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Ray raises the soft limit to the hard one.
    if hard != resource.RLIM_INFINITY and hard < MIN_OPEN_FILES:
        raise ValueError(
            f"a process may have {hard} files open here (`ulimit -Hn`), but Ray and its workers need {MIN_OPEN_FILES}: "
            "raise the limit in /etc/security/limits.conf, or with `docker run --ulimit nofile=65536` for a container"
        )
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=CONNECT_S).close()
    except OSError as error:
        raise ValueError(
            f"processes on this machine cannot reach each other at {LOOPBACK} ({error}), but the processes of a run "
            "have to: bring the loopback interface up (`ip link set lo up`), or let no firewall block it"
        ) from error


def check_devices(scheduler: SchedulerConfig, cluster: ClusterConfig) -> None:
    """Refuse a run on this machine alone (`scheduler.type=local`) that asks for more than it has.

    Raises:
        ValueError: several nodes, or more GPUs than there are.
    """
    if scheduler.type != "local":
        return
    if cluster.n_nodes > 1:
        raise ValueError(
            f"cluster.n_nodes is {cluster.n_nodes}, but scheduler.type=local is this machine alone: "
            "set scheduler.type=ray"
        )
    if cluster.n_gpus_per_node > (n_gpus := gpus_here()):
        raise ValueError(lacks_gpus(cluster.n_gpus_per_node, n_gpus))


def gpus_here() -> int:
    """Return the number of GPUs that a Ray started here would use, without creating a CUDA context."""
    manager = get_accelerator_manager_for_resource("GPU")
    visible = manager.get_current_process_visible_accelerator_ids()
    n_gpus = int(manager.get_current_node_num_accelerators())
    return n_gpus if visible is None else min(n_gpus, len(visible))


def lacks_gpus(asked: int, n_gpus: int) -> str:
    """Return the message for a run that asks one machine for more GPUs than it has."""
    zero = " (0: CPU processes)" if n_gpus == 0 else ""
    return (
        f"cluster.n_gpus_per_node is {asked}, but this machine has {n_gpus} GPUs: "
        f"set cluster.n_gpus_per_node={n_gpus}{zero}"
    )


@contextmanager
def writable_home(folder: Path) -> Iterator[None]:
    """Give processes that start inside this context a writable home folder.

    Triton, vLLM and others keep caches in the home folder and fail if it is read-only. These processes then get
    `folder` instead, but still read the user's cache of Hugging Face models.
    """
    home = Path(os.path.expanduser("~"))
    if _is_writable(home):
        yield
        return
    caches = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    folder.mkdir()
    replaced = {"HOME": str(folder)}
    if (caches / "huggingface").is_dir():
        replaced["HF_HOME"] = os.environ.get("HF_HOME") or str(caches / "huggingface")
    before = {name: os.environ.get(name) for name in replaced}
    os.environ.update(replaced)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _is_writable(folder: Path) -> bool:
    try:
        # Permissions alone are not enough: the file system may be mounted read-only.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True
