"""What a worker process is told through its environment, before torch is imported in it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivefold.cluster.nodes import Node
    from fivefold.cluster.session import Role

MAX_THREADS = 16
"""More OpenMP threads than this make the small CPU operations of a worker slower."""

PLACE_ON_NODE = "FIVEFOLD_PLACE_ON_NODE"
PROCESSES_ON_NODE = "FIVEFOLD_PROCESSES_ON_NODE"
"""Which of a role's processes on its node a worker is, from 0, and how many they are."""

FORWARDED = (
    "HF_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "NCCL_",
    "GLOO_",
    "TORCH_",
    "PYTORCH_",
    "VLLM_",
    "SGLANG_",
    "CUDA_DEVICE_MAX_CONNECTIONS",
)
"""Prefixes of the driver's variables that its workers get too, on a joined cluster as on this machine."""


def worker_environment(role: Role, rank: int, nodes: Sequence[Node]) -> dict[str, str]:
    """Rank, world, devices and threads of one worker, and which of its role's on the node it is.

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
        PLACE_ON_NODE: str(homes[:rank].count(node.index)),
        PROCESSES_ON_NODE: str(homes.count(node.index)),
        "CUDA_VISIBLE_DEVICES": ",".join(node.gpus[device.local] for device in processes[rank]) if node.gpus else "",
        "OMP_NUM_THREADS": str(_threads(role, node)),
    }
    if len(nodes) == 1 and (interface := loopback()):
        # Gloo looks up the host's own name, which containers often cannot resolve.
        environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    return environment | dict(role.environment)


def master_environment(host: str, port: int) -> Mapping[str, str]:
    """Where torch.distributed meets, for `init_method="env://"`. The store is open already, on rank 0."""
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def master_host(nodes: Sequence[Node], rank_0: Node) -> str:
    """Address of rank 0's node, as the others reach it."""
    return "127.0.0.1" if len(nodes) == 1 else rank_0.host


def _threads(role: Role, node: Node) -> int:
    """The role's own number, else the driver's OMP_NUM_THREADS, else the node's cores shared among its processes."""
    if role.threads is not None:
        return role.threads
    if "OMP_NUM_THREADS" in os.environ:
        return int(os.environ["OMP_NUM_THREADS"].split(",")[0])
    processes = sum(devices[0].node == node.index for devices in role.processes())
    return max(1, min(MAX_THREADS, node.cores // processes))


def loopback() -> str | None:
    """Name of the interface by which this machine reaches itself."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), None)
