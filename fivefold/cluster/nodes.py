"""The machines and devices of a run, reserved in Ray.

On each node, one placement-group bundle holds all of the run's devices. Workers run in the bundle without claiming any
of it, and CUDA_VISIBLE_DEVICES selects their devices, so several roles can share one GPU that no other job can take.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import ray
from ray._common.utils import get_system_memory
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fivefold.cluster.ray_nodes import RayNode, address_order, listing, ray_nodes, wait_for_nodes
from fivefold.observe.machine import least_gpu_memory, versions

GRANT_S = 30.0
"""Least seconds that Ray gets to grant free devices."""
LOOK_S = 120.0
"""Seconds that Ray gets to start a first process on each node."""


@dataclass(frozen=True)
class Node:
    """One machine of the run."""

    index: int
    """Index in the run: 0 is the driver's machine if it takes part; the others follow by address."""
    host: str
    """IP address."""
    gpus: tuple[str, ...]
    """The run's devices on it, as CUDA_VISIBLE_DEVICES names them; empty: CPU processes."""
    cores: int
    """CPU cores that processes on it may use."""
    interface: str | None
    """Name of the network interface by which other nodes reach it; None: no interface has the address."""
    port: int
    """TCP port of Ray's process on it, the raylet."""
    strategy: PlacementGroupSchedulingStrategy = field(repr=False)
    """Puts a worker on this node, inside the reservation."""
    gpu_memory: int | None = None
    """Bytes of the smallest of `gpus`; None: there are none, or no driver for them."""
    host_memory: int = 0
    """Bytes of host memory that processes here may use."""


@dataclass(frozen=True)
class Look:
    """What a process on a node finds there."""

    gpus: tuple[str, ...]
    cores: int
    interface: str | None
    versions: dict[str, str]
    gpu_memory: int | None
    host_memory: int


def reserve(n_nodes: int, n_gpus: int, wait_s: float, *, is_local: bool) -> tuple[Node, ...]:
    """Reserve `n_nodes` machines with `n_gpus` GPUs each (0: CPU processes) until this driver ends.

    Args:
        n_nodes: number of machines.
        n_gpus: number of GPUs of each.
        wait_s: seconds to wait for missing machines, and for devices that other jobs hold.
        is_local: whether this process has started Ray, so that Ray's processes share its machine and software.

    Raises:
        ValueError: the cluster does not have them, or other jobs hold them for too long, or a node's software is not
            the driver's.
    """
    deadline = time.monotonic() + wait_s
    wait_for_nodes(n_nodes, n_gpus, wait_s)
    bundle = {"GPU": n_gpus} if n_gpus else {"CPU": 1}
    group = placement_group([bundle] * n_nodes, strategy="STRICT_SPREAD")
    try:
        ray.get(group.ready(), timeout=max(GRANT_S, deadline - time.monotonic()))
    except GetTimeoutError:
        remove_placement_group(group)
        raise ValueError(_who_holds_them(n_nodes, n_gpus, wait_s)) from None
    machines = {machine.ray_id: machine for machine in ray_nodes()}
    homes = [machines[ray_id] for _, ray_id in sorted(placement_group_table(group)["bundles_to_node_id"].items())]
    strategies = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range(n_nodes)]
    if is_local and not n_gpus:
        looks = [look_here(home.host) for home in homes]
    else:
        looks = _look_around(homes, strategies, n_gpus)
    check_versions({home.host: look.versions for home, look in zip(homes, looks, strict=True)})
    own = ray.get_runtime_context().get_node_id()
    order = sorted(range(n_nodes), key=lambda i: (homes[i].ray_id != own, address_order(homes[i].host)))
    return tuple(_node(index, homes[i], looks[i], strategies[i]) for index, i in enumerate(order))


def _node(index: int, home: RayNode, look: Look, strategy: PlacementGroupSchedulingStrategy) -> Node:
    return Node(
        index, home.host, look.gpus, look.cores, look.interface, home.port, strategy, look.gpu_memory, look.host_memory
    )


def _look_around(
    homes: Sequence[RayNode], strategies: Sequence[PlacementGroupSchedulingStrategy], n_gpus: int
) -> list[Look]:
    """Start a process on each node that reports what is there.

    Raises:
        ValueError: no process starts, or it fails, for example because it cannot import Fivefold.
    """
    look = ray.remote(look_here)
    probes = [
        look.options(num_cpus=0 if n_gpus else 1, num_gpus=n_gpus, scheduling_strategy=strategy).remote(home.host)
        for home, strategy in zip(homes, strategies, strict=True)
    ]
    started, _ = ray.wait(probes, num_returns=len(probes), timeout=LOOK_S)
    looks = []
    for home, probe in zip(homes, probes, strict=True):
        if probe not in started:
            raise ValueError(f"Ray has started no process on node {home.host} in {LOOK_S:g} s: see its logs there")
        try:
            looks.append(ray.get(probe))
        except RayError as error:
            what = str(error).strip().splitlines()[-1]
            raise ValueError(
                f"the first process that Ray started on node {home.host} failed. Fivefold must be installed there as "
                f"here, and Ray be started from that environment (`.venv/bin/ray start`).\n{what}"
            ) from None
    return looks


def look_here(host: str) -> Look:
    """Return what this process finds on its node, whose IP address is `host`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(host)
    gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
    return Look(gpus, cores, interface, versions(), least_gpu_memory() if gpus else None, get_system_memory())


def interface_of(host: str) -> str | None:
    """Return the name of this machine's network interface that has the IP address `host`; None if there is none.

    All loopback addresses belong to the loopback interface, although it lists only one.
    """
    wanted = ipaddress.ip_address(host)
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family.name not in ("AF_INET", "AF_INET6"):
                continue
            own = ipaddress.ip_address(address.address.partition("%")[0])
            if wanted == own or (wanted.is_loopback and own.is_loopback):
                return name
    return None


def check_versions(of_nodes: Mapping[str, Mapping[str, str]]) -> None:
    """Refuse nodes whose software differs from the driver's.

    Builds for other devices (`2.9.0+cpu` and `2.9.0+cu128`) and Python's patch releases count as the same version.

    Args:
        of_nodes: the versions on each node, by address.

    Raises:
        ValueError: a version differs.
    """
    here = versions()
    for host, there in of_nodes.items():
        for name in here.keys() | there.keys():
            mine, its = here.get(name, "none"), there.get(name, "none")
            if _comparable(name, mine) != _comparable(name, its):
                raise ValueError(
                    f"node {host} has {name} {its}, but the driver has {name} {mine}: install the same versions on all "
                    "nodes, and start Ray from that environment"
                )


def _comparable(name: str, version: str) -> str:
    without_build = version.partition("+")[0]
    return without_build.rpartition(".")[0] if name == "python" else without_build


def _who_holds_them(n_nodes: int, n_gpus: int, wait_s: float) -> str:
    what = f"{n_gpus} free GPUs each" if n_gpus else "a free CPU each"
    return (
        f"other jobs have held the devices of the Ray cluster for {max(wait_s, GRANT_S):g} s: no {n_nodes} nodes with "
        f"{what}. Its nodes:\n{listing(ray_nodes())}\n"
        "Wait longer (scheduler.wait_s), or lower cluster.n_nodes or cluster.n_gpus_per_node."
    )


def check_shared(folder: Path, nodes: Sequence[Node]) -> None:
    """Refuse a folder that is not on storage that all of `nodes` share with this process.

    This process writes a temporary file there, which a process on each node looks for.

    Raises:
        ValueError: some nodes do not see the file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    token = folder / f".seen-by-all-nodes-{secrets.token_hex(8)}"
    token.touch()
    try:
        look = ray.remote(_sees)
        seen = ray.get([look.options(num_cpus=0, scheduling_strategy=node.strategy).remote(token) for node in nodes])
    finally:
        token.unlink()
    if blind := [node.host for node, sees in zip(nodes, seen, strict=True) if not sees]:
        raise ValueError(
            f"the run's folder {folder} is written by processes on several machines, but what the driver writes there "
            f"is not seen on {', '.join(blind)}: set cluster.fileroot to a folder on storage that all nodes share"
        )


def _sees(path: Path) -> bool:
    # A network file system may cache an old listing of the folder for a while. Opening the folder refreshes it.
    return path.name in {entry.name for entry in path.parent.iterdir()} if path.parent.is_dir() else False
