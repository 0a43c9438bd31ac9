"""The machines of a Ray cluster as Ray lists them, and the wait for the ones that a run needs."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node

from fivefold.cluster.machine import lacks_gpus

POLL_S = 0.5
"""Seconds between two checks for missing nodes."""


@dataclass(frozen=True)
class RayNode:
    """One machine of a Ray cluster that is alive."""

    ray_id: str
    host: str
    """IP address."""
    port: int
    """TCP port of Ray's process on the node, the raylet."""
    gpus: int
    free_gpus: int
    """GPUs that no job holds."""
    cpus: int

    def has(self, n_gpus: int) -> bool:
        """Return whether the node has `n_gpus` GPUs, free or not; for 0, whether it has a CPU."""
        return self.gpus >= n_gpus and (n_gpus > 0 or self.cpus > 0)

    def __str__(self) -> str:
        return f"{self.host}: {self.gpus} GPUs, {self.free_gpus} of them free; {self.cpus} CPUs"


def ray_nodes() -> list[RayNode]:
    """Return the machines of the joined cluster that are alive, in the order of their addresses."""
    free = available_resources_per_node()
    nodes = [_node(entry, free.get(entry["NodeID"], {})) for entry in ray.nodes() if entry["Alive"]]
    return sorted(nodes, key=lambda node: address_order(node.host))


def address_order(host: str) -> tuple[int, int]:
    """Return a key that sorts IP addresses numerically, IPv4 first."""
    address = ipaddress.ip_address(host)
    return address.version, int(address)


def wait_for_nodes(n_nodes: int, n_gpus: int, wait_s: float) -> None:
    """Wait until the cluster has `n_nodes` machines of `n_gpus` GPUs (0: of a CPU), free or not.

    Raises:
        ValueError: it has fewer after `wait_s` seconds. The message lists the machines.
    """
    deadline = time.monotonic() + wait_s
    nodes = ray_nodes()
    while sum(node.has(n_gpus) for node in nodes) < n_nodes:
        if time.monotonic() >= deadline:
            raise ValueError(_what_is_missing(n_nodes, n_gpus, nodes, wait_s))
        time.sleep(POLL_S)
        nodes = ray_nodes()


def listing(nodes: Sequence[RayNode]) -> str:
    """Return a line for each node."""
    return "\n".join(f"  {node}" for node in nodes)


def _what_is_missing(n_nodes: int, n_gpus: int, nodes: Sequence[RayNode], wait_s: float) -> str:
    most = max((node.gpus for node in nodes), default=0)
    if len(nodes) == n_nodes == 1:
        return lacks_gpus(n_gpus, most)
    asked = f"with {n_gpus} GPUs each" if n_gpus else "for CPU processes"
    fitting = sum(node.has(n_gpus) for node in nodes)
    return (
        f"the recipe asks for {n_nodes} nodes {asked} (cluster.n_nodes, cluster.n_gpus_per_node), and after "
        f"{wait_s:g} s (scheduler.wait_s) the Ray cluster has {fitting} of them. Its nodes:\n{listing(nodes)}\n"
        "Start Ray on more machines (`ray start --address=...`), or lower cluster.n_nodes or cluster.n_gpus_per_node."
    )


def _node(entry: Mapping[str, Any], free: Mapping[str, float]) -> RayNode:
    resources = entry["Resources"]
    return RayNode(
        ray_id=entry["NodeID"],
        host=entry["NodeManagerAddress"],
        port=int(entry["NodeManagerPort"]),
        gpus=int(resources.get("GPU", 0)),
        free_gpus=int(free.get("GPU", 0)),
        cpus=int(resources.get("CPU", 0)),
    )
