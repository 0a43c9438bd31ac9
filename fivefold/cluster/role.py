"""A role: what runs in its processes, on which devices, and in which environment.

Environment variables are set before a worker imports torch.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.layout.backends import BACKENDS
from fivefold.layout.placement import Device

if TYPE_CHECKING:
    from fivefold.cluster.nodes import Node

MAX_THREADS = 16
"""Most OpenMP threads of a worker; more slow down its small CPU operations."""

MAX_THREADS_BESIDE_GPU = 4
"""Most OpenMP threads of a worker whose GPU does the work. Its CPU operations wait for the slowest of its threads, and
a thread without a free core waits for whatever runs there, such as a polling server."""

LOOPBACK = "127.0.0.1"
"""Address by which processes on one machine reach each other."""

PLACE_ON_NODE = "FIVEFOLD_PLACE_ON_NODE"
PROCESSES_ON_NODE = "FIVEFOLD_PROCESSES_ON_NODE"
"""Variables for a worker's index among its role's processes on its node, starting at 0, and for their number."""
NODE = "FIVEFOLD_NODE"
"""Variable for the index of a worker's node in the run. Nodes may be containers that share a machine's memory."""

HOST = "FIVEFOLD_HOST"
"""Variable for the address of a worker's node for processes on other nodes."""

FORWARDED = (
    "HF_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "PYTORCH_",
    *(backend.variables for backend in BACKENDS.values() if backend.is_server),
    "CUDA_DEVICE_MAX_CONNECTIONS",
)
"""Prefixes of the driver's variables that its workers inherit, on a joined cluster as on this machine."""


Build = str | Callable[..., Any]
"""Builds the object that a worker holds: `module:function`, or a callable that cloudpickle can carry."""


class Part:
    """Base of classes that add methods to what a worker holds, for the runs that call them.

    A worker makes one object of a part, `part(held)`, when one of its methods is called for the first time. Calls name
    the method, `group.call(Snapshots.take, folder)`, as they name methods of the held object's class. The class itself
    must define it: Python's name of an inherited method is the base class's.
    """

    def __init__(self, held: Any) -> None:
        """Take the held object."""


@dataclass(frozen=True)
class Role:
    """A role: its devices, and the object that each of its processes holds."""

    name: str
    devices: Sequence[Device]
    """Devices of the processes, rank 0 first (`Placement[role].devices`). Roles may share devices."""
    build: Build
    """Builds the object that a worker holds, called as `build(*args)` in the worker process."""
    args: tuple[Any, ...] = ()
    distributed: bool = False
    """Whether the ranks meet in torch.distributed: MASTER_ADDR and MASTER_PORT are set for `init_method="env://"`."""
    threads: int | None = None
    """OMP_NUM_THREADS; None: the driver's, or each process's share of the node's cores."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further environment variables of the processes, set before anything heavy is imported."""
    writes_run: bool = False
    """Whether the processes write to the run's folder, which their nodes must then share with the driver."""
    devices_per_process: int = 1
    """Number of `devices` of each process, all on one node."""
    imports: str = "torch"
    """A module that the processes import as soon as they run, while others still start."""

    def processes(self) -> list[Sequence[Device]]:
        """Return the devices of each process."""
        n = self.devices_per_process
        return [self.devices[first : first + n] for first in range(0, len(self.devices), n)]


def worker_environment(role: Role, rank: int, nodes: Sequence[Node]) -> dict[str, str]:
    """Return a worker's variables: rank, world size, devices, threads, and its index among its role's on the node.

    A worker sees its own devices and no others, so the first one is `cuda:0` and LOCAL_RANK is 0.
    """
    processes = role.processes()
    homes = [devices[0].node for devices in processes]
    node = nodes[homes[rank]]
    environment = {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)}
    environment |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(processes)),
        "LOCAL_RANK": "0",
        NODE: str(node.index),
        HOST: master_host(nodes, node),
        PLACE_ON_NODE: str(homes[:rank].count(node.index)),
        PROCESSES_ON_NODE: str(homes.count(node.index)),
        "CUDA_VISIBLE_DEVICES": ",".join(node.gpus[device.local] for device in processes[rank]) if node.gpus else "",
        "OMP_NUM_THREADS": str(_threads(role, node)),
        # Without it, Python programs that the worker starts import from the working folder first.
        "PYTHONSAFEPATH": "1",
    }
    interface = loopback() if len(nodes) == 1 else node.interface
    if interface is not None:
        # By default, Gloo looks up the host's name. Containers often cannot resolve it, and other machines often
        # resolve it to the loopback interface.
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    return environment | dict(role.environment)


def import_folders() -> list[str]:
    """Return the folders outside the Python installation that this process imports from.

    Workers import from them after the installed packages, so that no user's file hides a package.
    """
    installation = [Path(prefix) for prefix in {sys.prefix, sys.base_prefix}]
    folders = [Path(folder).absolute() for folder in sys.path]
    return [str(folder) for folder in folders if not any(map(folder.is_relative_to, installation))]


def master_environment(host: str, port: int) -> Mapping[str, str]:
    """Return the variables for `init_method="env://"`, which lead ranks to the store that rank 0 has opened."""
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def master_host(nodes: Sequence[Node], rank_0: Node) -> str:
    """Return the address by which the other ranks reach rank 0's node."""
    return LOOPBACK if len(nodes) == 1 else rank_0.host


def _threads(role: Role, node: Node) -> int:
    """Return the role's number, else the driver's OMP_NUM_THREADS, else a process's share of the node's cores.

    On nodes with GPUs, half of the cores are left to other processes.
    """
    if role.threads is not None:
        return role.threads
    # Set and empty means not set, as in a Slurm job that copies a variable which it does not have.
    if value := os.environ.get("OMP_NUM_THREADS", "").strip():
        threads = value.split(",")[0]
        if not threads.isdecimal() or int(threads) < 1:
            raise ValueError(
                f"OMP_NUM_THREADS={value!r} in the environment must be a whole number from 1: correct it, or unset it"
            )
        return int(threads)
    processes = sum(devices[0].node == node.index for devices in role.processes())
    if node.gpus:
        return max(1, min(MAX_THREADS_BESIDE_GPU, node.cores // (2 * processes)))
    return max(1, min(MAX_THREADS, node.cores // processes))


def loopback() -> str | None:
    """Return the name of this machine's loopback interface; None if it has no usual name."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)
