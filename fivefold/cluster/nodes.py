"""The machines and devices of a run, reserved in Ray.

On each node, one placement-group bundle holds all of the run's devices. Workers run in the bundle without claiming any
of it, and CUDA_VISIBLE_DEVICES names their devices. So several roles can share one GPU, and no other job of the cluster
can take it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

RESERVE_TIMEOUT_S = 300.0
"""Seconds to wait for devices of a shared cluster that other jobs hold."""


@dataclass(frozen=True)
class Node:
    """One machine of the run."""

    index: int
    host: str
    """IP address."""
    gpus: tuple[str, ...]
    """The run's devices on it, as CUDA_VISIBLE_DEVICES names them; empty: CPU processes."""
    cores: int
    """CPU cores that processes on it may use."""
    group: PlacementGroup

    def strategy(self) -> PlacementGroupSchedulingStrategy:
        """Return the strategy that puts a worker on this node, inside the reservation."""
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.index)


def reserve(n_nodes: int, n_gpus: int) -> tuple[Node, ...]:
    """Reserve `n_nodes` machines with `n_gpus` GPUs each (0: CPU processes), for as long as this driver lives.

    Raises:
        ValueError: the cluster does not have them, or other jobs hold them for too long.
    """
    _check_there_are(n_nodes, n_gpus)
    bundle = {"GPU": n_gpus} if n_gpus else {"CPU": 1}
    group = placement_group([bundle] * n_nodes, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready(), timeout=RESERVE_TIMEOUT_S)
    except GetTimeoutError:
        remove_placement_group(group)
        raise ValueError(
            f"other jobs have held the devices of the Ray cluster for {RESERVE_TIMEOUT_S:g} s: no {n_nodes} nodes "
            f"with {n_gpus} free GPUs each; wait for them, or lower cluster.n_nodes or cluster.n_gpus_per_node"
        ) from None
    look = ray.remote(_look)
    probes = [
        look.options(
            num_cpus=0 if n_gpus else 1,
            num_gpus=n_gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote()
        for index in range(n_nodes)
    ]
    return tuple(Node(index, host, gpus, cores, group) for index, (host, gpus, cores) in enumerate(ray.get(probes)))


def _look() -> tuple[str, tuple[str, ...], int]:
    """Return address, GPUs and cores of the node that this runs on; the GPUs are those of its bundle."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ray.util.get_node_ip_address(), tuple(str(gpu) for gpu in ray.get_gpu_ids()), cores


def _check_there_are(n_nodes: int, n_gpus: int) -> None:
    nodes: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
    if len(nodes) < n_nodes:
        raise ValueError(
            f"cluster.n_nodes is {n_nodes}, but the Ray cluster has {len(nodes)}: "
            "lower it, or add nodes with `ray start`"
        )
    gpus = sorted((int(node["Resources"].get("GPU", 0)) for node in nodes), reverse=True)
    if gpus[n_nodes - 1] < n_gpus:
        where = "this machine has" if len(nodes) == 1 else f"{n_nodes} nodes of the Ray cluster have at most"
        raise ValueError(
            f"cluster.n_gpus_per_node is {n_gpus}, but {where} {gpus[n_nodes - 1]} GPUs: "
            f"set cluster.n_gpus_per_node={gpus[n_nodes - 1]}"
            + (" (0: CPU processes)" if gpus[n_nodes - 1] == 0 else "")
        )
