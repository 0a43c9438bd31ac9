"""Environment variables of a worker process, which are set before it imports torch."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.layout.backends import BACKENDS

if TYPE_CHECKING:
    from fivefold.cluster.nodes import Node
    from fivefold.cluster.role import Role

MAX_THREADS = 16
"""Most OpenMP threads of a worker; more make its small CPU operations slower."""

MAX_THREADS_BESIDE_GPU = 4
"""Most OpenMP threads of a worker whose GPU does the work. Its CPU operations wait for the last of its threads, and one
that finds no free core makes them wait for as long as whatever is on its core goes on: a server that polls, say."""

LOOPBACK = "127.0.0.1"
"""Address by which the processes of one machine reach each other."""

PLACE_ON_NODE = "FIVEFOLD_PLACE_ON_NODE"
PROCESSES_ON_NODE = "FIVEFOLD_PROCESSES_ON_NODE"
"""Variables for a worker's index, from 0, among its role's processes on its node, and for the number of these."""
NODE = "FIVEFOLD_NODE"
"""Variable for the index of a worker's node in the run. Nodes may be containers that share their machine's memory."""

HOST = "FIVEFOLD_HOST"
"""Variable for the address by which processes on the run's other nodes reach a worker's node."""

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
"""Prefixes of the driver's variables that its workers get too, on a joined cluster as on this machine."""


def worker_environment(role: Role, rank: int, nodes: Sequence[Node]) -> dict[str, str]:
    """Return one worker's variables: rank, world size, devices, threads, and its place among its role's on the node.

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
        # Otherwise, Python programs that the worker starts import from the working folder first.
        "PYTHONSAFEPATH": "1",
    }
    interface = loopback() if len(nodes) == 1 else node.interface
    if interface is not None:
        # Gloo looks up the host's own name, which containers often cannot resolve, and which other machines often
        # resolve to the loopback interface.
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    return environment | dict(role.environment)


def import_folders() -> list[str]:
    """Return the folders outside the Python installation that this process imports from.

    Workers import from them too, but from installed packages first, so that a user's file hides no package.
    """
    installation = [Path(prefix) for prefix in {sys.prefix, sys.base_prefix}]
    folders = [Path(folder).absolute() for folder in sys.path]
    return [str(folder) for folder in folders if not any(map(folder.is_relative_to, installation))]


def master_environment(host: str, port: int) -> Mapping[str, str]:
    """Return the variables for `init_method="env://"`, by which ranks find the store that rank 0 has opened."""
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def master_host(nodes: Sequence[Node], rank_0: Node) -> str:
    """Return the address by which the other ranks reach rank 0's node."""
    return LOOPBACK if len(nodes) == 1 else rank_0.host


def _threads(role: Role, node: Node) -> int:
    """Return the role's own number, else the driver's OMP_NUM_THREADS, else a process's share of the node's cores.

    On nodes with GPUs, half of the cores are left to all else.
    """
    if role.threads is not None:
        return role.threads
    if "OMP_NUM_THREADS" in os.environ:
        return int(os.environ["OMP_NUM_THREADS"].split(",")[0])
    processes = sum(devices[0].node == node.index for devices in role.processes())
    if node.gpus:
        return max(1, min(MAX_THREADS_BESIDE_GPU, node.cores // (2 * processes)))
    return max(1, min(MAX_THREADS, node.cores // processes))


def loopback() -> str | None:
    """Return the name of this machine's loopback interface, None if it has none of a usual name."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)
